"""Floor 1: the engine. One declaration in, one recorded run out; knows no worker by name."""
