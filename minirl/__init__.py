"""minirl: reinforcement learning for language models and for walking, written once and run in both worlds.

Read in this order: functional/ (mathematics), models/ (things that act), worlds/ (places to act), algorithms/ (one a
file), then training.py. Nothing is imported here, so `import minirl` is quick and needs no simulator.
"""

__version__ = "0.1.0"
