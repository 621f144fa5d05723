"""How the daemon goes on as another Weft, with the workers that it has."""
