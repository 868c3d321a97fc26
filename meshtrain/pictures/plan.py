"""A plan: the pictures of its page, and its headline as text."""

from meshtrain.pictures.picture import Picture
from meshtrain.plan.estimate import Plan
from meshtrain.plan.page import notebook
from meshtrain.plan.report import headline


def picture(plan: Plan) -> Picture:
    return Picture(notebook(plan), headline(plan))
