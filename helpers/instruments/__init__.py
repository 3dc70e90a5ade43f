"""What lessons count and measure with: replay, traffic, cost, roofline, timing, timelines, races, records of GPUs."""
