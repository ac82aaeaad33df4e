"""``phyai rtc-study``: what the handoff method is worth, on a small task with two ways out, against the inference delay."""
