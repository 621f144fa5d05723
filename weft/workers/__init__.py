"""Workers: the long-lived processes that hold torch and the user's code."""
