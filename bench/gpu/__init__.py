"""`make gpu-check`: does the engine work on this GPU, and how near does it come to what the card allows?"""
