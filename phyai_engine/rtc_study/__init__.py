"""``phyai rtc-study``: what each handoff method is worth as inference gets slower, on a task with two ways out."""
