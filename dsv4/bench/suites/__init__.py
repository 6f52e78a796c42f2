"""Measurements of the commands: the main job, attention, a layer, routed experts, a whole model."""
