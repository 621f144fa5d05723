"""What a user gives as data, in which order its samples come, and what a microbatch of them makes."""
