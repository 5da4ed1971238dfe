"""The folders of the demo's model and of published models' config files."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"
PUBLISHED_MODELS = Path(__file__).parents[1] / "published_models"
