"""How a trajectory looks on a terminal: `page` lays text out, `header` and `steps` say what is in it, `player` turns
the pages."""
