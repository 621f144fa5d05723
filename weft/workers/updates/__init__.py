"""SYNC, UPDATE, VALIDATE: owners, the norm, sharded optimizers, state that moves."""
