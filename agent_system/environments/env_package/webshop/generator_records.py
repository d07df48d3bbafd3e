"""Generated products as records of the official files, with every key that an official record has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_system.environments.env_package.webshop.generator import GeneratedProduct

__all__ = ["attribute_record", "product_record"]


def attribute_record(product: GeneratedProduct) -> dict[str, Any]:
    """The product's entry of the attribute file."""
    return {
        "attributes": [attribute.text for attribute in product.attributes],
        "instruction": product.instruction,
        "instruction_attributes": list(product.instruction_attributes),
    }


def product_record(product: GeneratedProduct) -> dict[str, Any]:
    """The product in the official schema, with every key an official record has."""
    kind = product.kind
    return {
        "name": product.title,
        "product_information": "",
        "brand": f"Visit the {product.brand} Store",
        "brand_url": f"/stores/{product.brand}",
        "full_description": product.description,
        "pricing": " to ".join(f"${price:.2f}" for price in product.prices),
        "list_price": "",
        "availability_quantity": None,
        "availability_status": "In Stock.",
        "images": [f"/art/{product.asin}.svg"],
        "product_category": f"{kind.category.path} › {kind.name.title()}",
        "average_rating": "",
        "small_description": list(product.bullets),
        "total_reviews": "",
        "total_answered_questions": "",
        "model": "",
        "customization_options": {group: _option_records(product, group) for group in product.options},
        "seller_id": None,
        "seller_name": None,
        "fulfilled_by_amazon": None,
        "fast_track_message": "",
        "aplus_present": "",
        "asin": product.asin,
        "category": kind.category.name,
        "query": kind.name,
        "page": product.index // 48 + 1,
        "small_description_old": "",
    }


def _option_records(product: GeneratedProduct, group: str) -> list[dict[str, Any]]:
    """The values of one group. The last group of a range-priced product is the one that moves the price."""
    values = product.options[group]
    moves_price = len(product.prices) == 2 and group == list(product.options)[-1]
    records = []
    for position, value in enumerate(values):
        price = ""
        if moves_price:
            low, high = product.prices
            price = f"${low + (high - low) * position / max(len(values) - 1, 1):.2f}"
        image = f"/art/{product.asin}/{value}.svg" if group == "color" else None
        records.append(
            {
                "asin": product.asin,
                "is_selected": position == 0,
                "url": None,
                "value": value,
                "price_string": price,
                "price": 0,
                "image": image,
            }
        )
    return records
