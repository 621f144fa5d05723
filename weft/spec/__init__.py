"""What a user writes down, checked: the job, its strategy, presets, settings. Pure."""
