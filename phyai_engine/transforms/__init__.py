"""Steps between robot values and model inputs: image, state, prompt, normalisation. numpy and Pillow only."""
