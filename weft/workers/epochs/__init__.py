"""What a function of the user's that is asked after each epoch finds, and what comes of what it changes."""
