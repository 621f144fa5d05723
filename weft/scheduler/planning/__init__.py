"""From spec and facts to a checked plan: cut, place, synchronise, rings, costs, simulator. Pure."""
