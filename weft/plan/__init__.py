"""What every side agrees on: kinds of tasks, the graph, the plan, buckets, facts, rows; and arithmetic on them."""
