"""Which of many strategies a job gets, where its user leaves that to the planner."""
