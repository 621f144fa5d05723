"""What training has come to after an iteration: copied beside training, and put back where a job goes on from it."""
