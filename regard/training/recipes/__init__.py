"""Training objectives: recipes with `rows`, `batch` and `loss`."""

from regard.training.recipes.images import Contrastive, ImageClassification
from regard.training.recipes.labelled_texts import QuestionAnswering, TextClassification, TokenClassification
from regard.training.recipes.mlm import MaskedLM
from regard.training.recipes.recipe import Batch, CausalLM, Recipe
from regard.training.recipes.text_to_text import Infilling, SpanCorruption, Translation

__all__ = [
    "RECIPES",
    "Batch",
    "CausalLM",
    "Contrastive",
    "ImageClassification",
    "Infilling",
    "MaskedLM",
    "QuestionAnswering",
    "Recipe",
    "SpanCorruption",
    "TextClassification",
    "TokenClassification",
    "Translation",
]

RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe
    for recipe in (
        CausalLM,
        MaskedLM,
        SpanCorruption,
        Infilling,
        Translation,
        TextClassification,
        TokenClassification,
        QuestionAnswering,
        ImageClassification,
        Contrastive,
    )
}
"""By the name of the command, `regard train NAME`."""
