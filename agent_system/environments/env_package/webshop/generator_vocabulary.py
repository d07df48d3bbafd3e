"""Words of the generated shop: departments, product kinds, attributes, options and phrases.

The tables are data, not code: :mod:`generator` draws from them. They are the same for every seed, so a tokenizer
trained on one generated catalogue knows the words of all of them.

Three properties are kept on purpose (and tested):

* no attribute of a department, and no value of an option pool, counts as a match for another one under the shop's
  fuzzy comparison (a token-set ratio above 85), so a near-twin really is a different product;
* an option value is a base colour of the shop or contains none, because the shop takes a part for the whole;
* a few attributes are shared by departments, so an attribute alone never names the product.

What is left out: real brands, and anything that is not plain lower-case English.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = [
    "ASIN_CODES",
    "ASIN_HEADS",
    "ASIN_TAILS",
    "BRAND_ENDS",
    "BRAND_MIDDLES",
    "BRAND_STARTS",
    "CATEGORIES",
    "KINDS",
    "OPTION_POOLS",
    "Attribute",
    "Category",
    "Kind",
]


@dataclass(frozen=True)
class Attribute:
    """A property of a product, such as ``machine washable``.

    ``is_thing`` tells how a sentence takes it: "which is machine washable" against "which has a rubber sole".
    """

    text: str
    is_thing: bool


@dataclass(frozen=True)
class Category:
    """A department: its official-looking path, its attributes and the option groups its products may have."""

    name: str
    path: str
    attributes: tuple[Attribute, ...]
    option_groups: tuple[tuple[str, str], ...]  # (group name, pool name)
    uses: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """What a product is, such as ``running shoes``, with the usual price range in dollars."""

    name: str
    category: Category
    low: int
    high: int


#: Option pool name -> values. Short, and pairwise different for the shop's fuzzy comparison.
OPTION_POOLS: dict[str, tuple[str, ...]] = {
    "color": ("black", "white", "red", "blue", "green", "teal", "pink", "purple", "brown", "beige", "orange", "yellow"),
    "clothing size": ("small", "medium", "large", "petite", "tall"),
    "shoe size": ("5", "6", "7", "8", "9", "10"),
    "bed size": ("twin", "full", "queen", "king"),
    "size": ("small", "medium", "large", "jumbo", "mini"),
    "pack": ("1 pack", "2 pack", "3 pack", "4 pack", "6 pack"),
    "length": ("short", "regular", "long"),
    "scent": ("lavender", "citrus", "coconut", "cedar", "jasmine", "unscented"),
    "flavor": ("vanilla", "chocolate", "lemon", "berry", "mint", "cinnamon", "maple"),
    "roast": ("light", "medium", "dark", "decaf"),
    "shade": ("ivory", "coral", "plum", "ruby", "nude", "cocoa"),
    "material": ("oak", "walnut", "bamboo", "metal", "glass", "marble"),
    "finish": ("matte", "glossy", "satin", "brushed"),
    "metal": ("gold", "silver", "copper", "bronze"),
    "shape": ("round", "square", "oval", "heart"),
    "style": ("modern", "nordic", "vintage", "coastal"),
    "plug": ("usb c", "barrel", "micro"),
    "hand": ("left", "right"),
    "bulb": ("warm", "cool", "neutral"),
    "firmness": ("soft", "medium", "firm"),
    "age": ("infant", "toddler", "child", "teen"),
}

# name | path | option groups (group=pool) | attributes ("+" marks a thing one has) | uses | kinds (name:low-high)
_CATEGORY_TABLE = """
shoes | Clothing, Shoes & Jewelry › Shoes | color=color, size=shoe size
 | slip resistant, +arch support, +rubber sole, +memory foam, water resistant, +wide toe, machine washable,
   +breathable mesh, +padded collar, lightweight, shock absorbing, +reflective trim
 | travel, work, long walks | running shoes:28-95, ankle boots:35-120, sandals:18-60
womens | Clothing, Shoes & Jewelry › Women | color=color, size=clothing size
 | +long sleeves, +high waist, +v neck, hand washable, quick drying, +stretch fabric, soft cotton, +floral print,
   loose fitting, +button closure, +side pockets, wrinkle free
 | the office, weekends, parties | summer dress:22-80, blouse:15-55, leggings:12-45
mens | Clothing, Shoes & Jewelry › Men | color=color, size=clothing size
 | +short sleeves, slim fitting, moisture wicking, machine washable, +classic collar, +zipper closure,
   +drawstring waist, +cotton blend, +sun protection, tag free, fade resistant, +reinforced seams
 | the gym, everyday wear, work | polo shirt:15-50, hoodie:22-70, cargo shorts:18-55
kids | Toys & Games › Kids | color=color, age=age
 | bpa free, easy to clean, hand painted, +rounded edges, non toxic, battery free, +soft plush, educational,
   +washable cover, splash proof, +gift box, +storage bag
 | playtime, birthdays, rainy days | building blocks:12-60, bath toys:9-30, stuffed animal:10-45
skincare | Beauty & Personal Care › Skin Care | scent=scent, pack=pack
 | fragrance free, cruelty free, paraben free, +sensitive skin, +coconut oil, +shea butter, +hyaluronic acid,
   alcohol free, long lasting, fast absorbing, dermatologist tested, +green tea extract
 | morning care, night care, winter | face cream:9-55, body lotion:8-35, lip balm:5-25
haircare | Beauty & Personal Care › Hair Care | scent=scent, size=size
 | sulfate free, +argan oil, color safe, +damaged hair, +curly hair, +tea tree, dye free, cruelty free, +keratin,
   anti frizz, +oily scalp, plant based
 | daily care, swimmers, travel | shampoo:8-40, hair mask:9-45, styling gel:6-28
makeup | Beauty & Personal Care › Makeup | shade=shade, pack=pack
 | long lasting, smudge proof, highly pigmented, fragrance free, +natural ingredients, vegan, easy to apply,
   oil free, +vitamin e, +matte look, paraben free, travel sized
 | evenings, weddings, everyday | lipstick:6-32, mascara:7-30, nail polish:5-22
grooming | Beauty & Personal Care › Grooming | color=color, hand=hand
 | +stainless steel, cordless, rechargeable, +soft bristles, easy to clean, +travel case, water resistant,
   +quiet motor, +pressure sensor, +precision blades, low vibration, +charging stand
 | travel, sensitive gums, daily use | electric toothbrush:18-95, beard trimmer:16-80, hair clipper:22-90
audio | Electronics › Audio | color=color
 | noise cancelling, +wireless charging, +deep bass, sweat proof, +built in microphone, +fast pairing, foldable,
   +volume control, +carrying case, hands free, +surround sound, +long battery life
 | commuting, parties, workouts | headphones:25-160, earbuds:15-110, portable speaker:20-130
computer | Electronics › Computers | color=color, plug=plug
 | plug and play, +adjustable angle, +quiet keys, ergonomic, +aluminum alloy, +high speed, compact,
   +led backlight, non slip, +braided cable, +low profile, +energy saving
 | gaming, study, the office | computer keyboard:18-120, computer mouse:9-70, laptop stand:15-75
phone | Electronics › Phones | color=color, plug=plug
 | shock proof, +wireless charging, scratch resistant, +tempered glass, +fast charging, ultra thin,
   +kickstand, +magnetic mount, +card slot, +raised edges, easy to install, fingerprint free
 | travel, the car, work | phone case:8-45, phone charger:9-50, phone holder:8-40
security | Electronics › Home Security | color=color, style=style
 | +night vision, +motion detection, weather proof, +solar power, +two way audio, +wide angle, easy to install,
   +wireless signal, +remote control, +loud alarm, high definition, +phone alerts
 | the porch, garages, shops | security camera:25-180, video doorbell:35-170, alarm system:30-190
cookware | Home & Kitchen › Cookware | color=color, size=size
 | dishwasher safe, non stick, oven safe, +stainless steel, heat resistant, +glass lid, bpa free, +wooden handle,
   +even heating, scratch resistant, +cast iron, +pour spout
 | family meals, baking, camping | frying pan:15-90, sauce pan:18-85, mixing bowl:10-45
appliances | Home & Kitchen › Appliances | color=color, finish=finish
 | +auto shut off, easy to clean, +digital display, energy efficient, +large capacity, +removable tray,
   +adjustable timer, +quiet motor, +stainless steel, space saving, +keep warm function, +recipe book
 | small kitchens, breakfast, offices | coffee maker:28-170, blender:25-140, toaster:20-95
drinkware | Home & Kitchen › Drinkware | color=color, size=size
 | leak proof, +double wall, bpa free, dishwasher safe, vacuum insulated, +straw lid, +carry handle, microwave safe,
   +wide mouth, +hand glazed finish, sweat free, +borosilicate glass
 | hiking, the office, gifts | water bottle:10-45, coffee mug:8-35, travel tumbler:12-50
bedding | Home & Kitchen › Bedding | color=color, size=bed size
 | machine washable, ultra soft, +cooling fabric, hypoallergenic, +deep pockets, wrinkle free, +egyptian cotton,
   +bamboo fiber, quilted, fade resistant, +hidden zipper, all season
 | guests, hot sleepers, dorms | bed sheets:22-110, comforter:32-150, throw blanket:16-70
bath | Home & Kitchen › Bath | color=color, pack=pack
 | highly absorbent, quick drying, mildew resistant, non slip, +turkish cotton, machine washable, lint free,
   +rubber backing, +memory foam, +metal grommets, water proof, +waffle weave
 | guests, hotels, family use | bath towel:12-60, shower curtain:10-45, bath mat:12-50
furniture | Home & Kitchen › Furniture | color=color, material=material
 | easy to assemble, +solid wood, space saving, +lumbar support, height adjustable, +faux leather, heavy duty,
   +storage drawers, +metal legs, scratch resistant, +padded seat, +open shelves
 | offices, small rooms, living rooms | office chair:60-260, coffee table:55-240, bar stool:40-170
lighting | Tools & Home › Lighting | bulb=bulb, finish=finish
 | energy efficient, +touch control, +dimmable bulb, battery powered, +usb port, eye caring, +remote control,
   +glass shade, +solar power, easy to install, +flexible neck, water proof
 | reading, patios, bedrooms | desk lamp:15-80, floor lamp:30-140, string lights:9-50
decor | Home & Kitchen › Decor | style=style, size=size
 | hand woven, +solid wood, non slip, stain resistant, ready to hang, +natural fibers, +beveled edge, fade resistant,
   light weight, +geometric pattern, easy to clean, eco friendly
 | hallways, bedrooms, gifts | area rug:28-180, wall mirror:25-140, picture frame:9-55
snacks | Grocery › Snacks | flavor=flavor, pack=pack
 | gluten free, sugar free, non gmo, low sodium, high protein, plant based, individually wrapped, kosher certified,
   nut free, dairy free, keto friendly, +real fruit
 | lunch boxes, hiking, movie nights | protein bars:9-45, trail mix:8-38, cookies:6-32
beverages | Grocery › Beverages | roast=roast, pack=pack
 | usda organic, fair trade, +rich flavor, caffeine rich, low acid, non gmo, +resealable bag, sugar free,
   small batch, shade grown, +single origin, kosher certified
 | mornings, offices, guests | ground coffee:9-48, coffee pods:12-55, instant coffee:8-40
pets | Pet Supplies › Pets | color=color, size=size
 | machine washable, chew proof, +orthopedic foam, non toxic, +reflective stitching, water proof, +adjustable strap,
   easy to clean, +removable cover, +padded handle, tear resistant, anti slip
 | puppies, walks, older pets | dog bed:22-110, dog leash:8-40, cat tree:35-160
garden | Patio, Lawn & Garden › Garden | color=color, size=size
 | weather resistant, rust proof, +drainage holes, sun proof, heavy duty, light weight, +brass fittings,
   kink free, +hand crank, self watering, leak proof, +wooden handle
 | balconies, patios, vegetables | garden hose:18-85, plant pot:9-60, patio umbrella:38-170
sports | Sports & Outdoors › Sports | color=color, length=length
 | non slip, +carrying strap, extra thick, sweat proof, eco friendly, latex free, +alignment lines, heavy duty,
   +carrying case, easy to clean, tear resistant, +foam handles
 | home gyms, yoga, beginners | yoga mat:14-75, jump rope:7-35, resistance bands:9-50
camping | Sports & Outdoors › Camping | color=color, size=size
 | water proof, easy to carry, quick drying, wind resistant, +mesh windows, light weight, +rain cover,
   +steel poles, rust proof, fire retardant, insulated, +storage pockets
 | festivals, families, mountain trips | camping tent:55-240, sleeping bag:28-130, camping chair:22-95
luggage | Clothing, Shoes & Jewelry › Luggage | color=color, size=size
 | water resistant, +laptop sleeve, +vegan leather, anti theft, +padded straps, expandable, +spinner wheels,
   scratch resistant, +usb port, light weight, +shoe pocket, rip proof
 | school, business trips, weekends | travel backpack:25-110, tote bag:18-85, suitcase:50-220
jewelry | Clothing, Shoes & Jewelry › Jewelry | metal=metal, shape=shape
 | nickel free, tarnish resistant, hand crafted, +gift box, adjustable, +sterling base, +natural stone, hypoallergenic,
   water proof, +engraved message, +cubic zirconia, +lobster clasp
 | birthdays, weddings, everyday wear | bracelet:10-70, necklace:12-95, earrings:9-60
"""


def _attribute(text: str) -> Attribute:
    return Attribute(text.removeprefix("+"), text.startswith("+"))


def _parse_table(table: str) -> tuple[tuple[Category, ...], tuple[Kind, ...]]:
    """Read the category table. Each category spans several lines; a line that starts with a letter begins a new one."""
    records: list[str] = []
    for line in table.strip().splitlines():
        if line[0] == " ":
            records[-1] += " " + line.strip()
        else:
            records.append(line.strip())
    categories: list[Category] = []
    kinds: list[Kind] = []
    for record in records:
        name, path, groups, attributes, uses, kind_list = (field.strip() for field in record.split("|"))
        category = Category(
            name=name,
            path=path,
            attributes=tuple(_attribute(text.strip()) for text in attributes.split(",")),
            option_groups=tuple(tuple(pair.strip().split("=")) for pair in groups.split(",")),  # type: ignore[misc]
            uses=tuple(use.strip() for use in uses.split(",")),
        )
        categories.append(category)
        for entry in kind_list.split(","):
            kind_name, prices = entry.strip().split(":")
            low, high = prices.split("-")
            kinds.append(Kind(kind_name, category, int(low), int(high)))
    return tuple(categories), tuple(kinds)


CATEGORIES, KINDS = _parse_table(_CATEGORY_TABLE)

# Brand names are a start and an end ("Norvale"); long catalogues put a middle between them.
_STARTS = "Nor Amber Iron Cedar Lumi Velo Brook Ash Silver Oak Fern Vista Peak Harbor North Willow"
_MIDDLES = "en or al in er is an el"
_ENDS = "vale fox crest well wick ton ridge field bay more stead lane mark dale wood line"
BRAND_STARTS, BRAND_MIDDLES, BRAND_ENDS = tuple(_STARTS.split()), tuple(_MIDDLES.split()), tuple(_ENDS.split())

# A product id is "B0", a head and a tail of four letters each. The first CODE_HEADS * CODE_TAILS products of a shop
# share few heads and tails, so that a small tokenizer spends two tokens on an id and a small model learns to copy it.
CODE_HEADS, CODE_TAILS = 100, 20


def _all_codes() -> tuple[str, ...]:
    pairs = [first + second for first in "BCDFGHJKLM" for second in "NPQRSTVWXZ"]
    codes = [first + second for first in pairs for second in pairs]
    random.Random("product codes").shuffle(codes)
    return tuple(codes)


ASIN_CODES = _all_codes()
ASIN_HEADS, ASIN_TAILS = ASIN_CODES[:CODE_HEADS], ASIN_CODES[-CODE_TAILS:]
