"""What tensors lie in and lanes wait on: arena, board, directory, collectives."""
