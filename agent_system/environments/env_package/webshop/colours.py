"""Colour words of option values, reduced to a base colour before options are compared.

The list is the original's own, no standard's ("ash", "christmas" and "dark" are in it), in alphabetical order, which
decides where a value holds several. What is known of it: it has 97 entries; the recordings of its answers prove 29 of
the 102 below (without any of those some recorded answer would differ) and contradict none. Five of the other 73 are
therefore too many, and no recording says which. Such an entry matters only where two values that are both otherwise
without a colour share it.
"""

from __future__ import annotations

_COLOUR_LIST = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream
crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather
indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha
multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal
rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise
violet walnut wheat white wine yellow
"""
BASE_COLOURS = tuple(_COLOUR_LIST.split())


def normalise_colour(value: str | tuple[str, str]) -> str | tuple[str, str]:
    """The first base colour that is part of ``value`` in place of all of it; else ``value``.

    For a ``(group, value)`` pair, part of means equal to one of the two.

    >>> normalise_colour("navy blue"), normalise_colour("standard"), normalise_colour("x-large")
    ('blue', 'tan', 'x-large')
    """
    for colour in BASE_COLOURS:
        if colour in value:
            return colour
    return value
