"""``phyai rtc-study``: what each handoff method is worth as inference gets slower, on a small task with two ways out."""
