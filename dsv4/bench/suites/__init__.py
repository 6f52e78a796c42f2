"""What a command measures: the main job, attention, a layer, routed experts, a whole model."""
