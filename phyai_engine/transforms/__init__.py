"""Steps between robot values and model inputs: units, images, state, prompt, normalisation.

numpy and Pillow; the two packages that read tokenizers are imported only for a file that needs one.
"""
