"""Family "stories": open-ended text. Most words are free, but what was once named must stay as it is.

A story must hold both things that were asked for, use one name for its hero, and one colour for the thing.
"""

import dataclasses
import itertools
import random
import re

from oled_jax.demo.items import Draft, Item, Template

HEROES = (
    "fox", "bear", "rabbit", "mouse", "hen", "cat", "dog", "duck", "frog", "horse", "goat", "lion", "turtle", "wolf",
    "boy", "girl", "farmer", "baker", "sailor", "painter", "teacher", "king", "queen", "robot",
)  # fmt: skip
THINGS = (
    "kite", "boat", "hat", "ball", "lamp", "bike", "drum", "key", "coat", "cup", "bell", "flag", "box", "book",
    "wagon", "ring", "scarf", "basket", "clock", "mirror",
)  # fmt: skip
NAMES = (
    "Ella", "Milo", "Nora", "Otto", "Ruby", "Theo", "Lily", "Max", "Ivy", "Felix", "Clara", "Oscar", "Mia", "Jonas",
    "Wilma", "Emil", "Frida", "Anton", "Stella", "Hugo",
)  # fmt: skip
COLORS = (
    "red", "blue", "green", "yellow", "white", "black", "brown", "pink", "golden", "purple", "silver", "gray",
)  # fmt: skip
SLOTS = {
    "place": ("forest", "village", "valley", "town", "garden", "meadow", "island", "castle", "mill", "harbor", "desert",
              "mountain"),
    "size": ("small", "big", "little", "quiet", "bright", "cold", "busy", "lovely", "strange", "sleepy"),
    "mood": ("happy", "shy", "brave", "clever", "lonely", "kind", "curious", "proud", "gentle", "lazy", "careful",
             "cheerful"),
    "time": ("morning", "evening", "afternoon", "night", "summer", "winter", "spring", "autumn"),
    "where": ("river", "lake", "road", "bridge", "hill", "market", "tree", "well", "church", "cave", "barn", "gate"),
    "friend": ("friend", "neighbor", "sister", "brother", "visitor", "stranger", "cousin", "grandmother"),
    "weather": ("sun was shining", "wind was blowing", "rain was falling", "snow was melting", "stars were out",
                "sky was clear", "clouds were low", "moon was full"),
    "verb": ("found", "saw", "lost", "bought", "made", "fixed", "hid", "borrowed", "cleaned", "wanted"),
    "way": ("slowly", "quickly", "quietly", "proudly", "carefully", "happily", "alone", "all day"),
    "feel": ("smiled", "laughed", "sang", "danced", "cried", "waited", "slept", "cheered"),
    "food": ("bread", "soup", "cake", "cheese", "honey", "apples", "tea", "berries", "milk", "nuts"),
}  # fmt: skip
OPENINGS = (
    "Once upon a time there was a {mood} {hero} named {name}.",
    "In a {size} {place} lived a {mood} {hero} named {name}.",
    "Long ago, a {mood} {hero} named {name} lived near the {where}.",
    "There was once a {hero} named {name}, who was very {mood}.",
    "One {time}, a {mood} {hero} named {name} came to a {size} {place}.",
)
FINDINGS = (
    "One {time}, {name} {verb} a {color} {thing} near the {where}.",
    "By the {where}, {name} {verb} a {color} {thing}.",
    "A {friend} gave {name} a {color} {thing} that {time}.",
    "{name} {verb} a {color} {thing} when the {weather}.",
    "In the {place} {name} {verb} a {size} and {color} {thing}.",
)
MIDDLES = (
    "The {weather}, and {name} walked {way} to the {where}.",
    "{name} ate {food} with a {friend} under the {where}.",
    "A {mood} {friend} came along and {feel}.",
    "They talked about the {place} and ate {food}.",
    "{name} was {mood} and {feel} {way}.",
    "Then {name} went {way} through the {size} {place}.",
    "Nobody in the {place} knew why the {friend} {feel}.",
)
RETURNS = (
    "{name} carried the {color} {thing} {way} to the {place}.",
    "The {color} {thing} was lying by the {where}.",
    "Everyone wanted to see the {color} {thing}.",
    "{name} showed the {color} {thing} to a {mood} {friend}.",
    "But the {color} {thing} was gone by the {time}.",
)
ENDINGS = (
    "In the end {name} {feel}, and the {hero} kept the {color} {thing}.",
    "That {time} {name} gave the {color} {thing} to a {friend} and {feel}.",
    "So {name} the {hero} went home with the {color} {thing}.",
    "From then on {name} and the {color} {thing} were known in the whole {place}.",
    "And {name} {feel} because the {color} {thing} was safe.",
)
ORDERS = (("opening", "finding", "middle", "return", "ending"), ("opening", "middle", "finding", "return", "ending"),
          ("opening", "finding", "middle", "middle", "ending"))  # fmt: skip
PARTS = {"opening": OPENINGS, "finding": FINDINGS, "middle": MIDDLES, "return": RETURNS, "ending": ENDINGS}
REQUESTS = {
    "about": ("Write a short story about a {hero} and a {thing}.", "Tell me a story about a {hero} and a {thing}."),
    "in-which": ("Write a story in which a {hero} has a {thing}.", "Tell a tale where a {hero} meets a {thing}."),
    "with": ("I want a story with a {hero} and a {thing} in it.", "Make up a story with a {thing} and a {hero}."),
    "please": ("Please tell a short story of a {hero} with a {thing}.", "Give me a tale of a {thing} and a {hero}."),
    "bedtime": ("Tell my son a bedtime story of a {hero} and a {thing}.", "A bedtime story: a {hero} and a {thing}."),
    "invent": ("Invent a little tale about a {thing} and a {hero}.", "Think up a tale of a {hero} who has a {thing}."),
    "named": ("Write a story of a {hero} named {name} and a {thing}.", "Tell a tale: {name} the {hero} and a {thing}."),
    "colored": (
        "Write a story about a {hero} and a {color} {thing}.",
        "Tell a tale of a {color} {thing} and a {hero}.",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoryTemplate:
    """One way to ask. The request names a hero and a thing, and maybe a name or a colour."""

    name: str
    requests: tuple[str, ...]

    def draw(self, rng: random.Random) -> Draft:
        fixed = {
            "hero": rng.choice(HEROES),
            "thing": rng.choice(THINGS),
            "name": rng.choice(NAMES),
            "color": rng.choice(COLORS),
        }
        request = rng.choice(self.requests)
        sentences = [self._sentence(part, fixed, rng) for part in rng.choice(ORDERS)]
        expected = {"hero": fixed["hero"], "thing": fixed["thing"]}
        expected |= {key: fixed[key] for key in ("name", "color") if f"{{{key}}}" in request}
        return Draft(
            prompt=request.format(**fixed),
            answer=" ".join(sentences),
            key=(fixed["hero"], fixed["thing"]),
            expected=expected,
        )

    @staticmethod
    def _sentence(part: str, fixed: dict[str, str], rng: random.Random) -> str:
        words = {slot: rng.choice(choices) for slot, choices in SLOTS.items()}
        return rng.choice(PARTS[part]).format(**words, **fixed)


def check(item: Item, text: str) -> bool:
    """Both things are there; one name throughout; the thing has one colour; both as asked where asked for."""
    expected = item.expected
    words = re.findall(r"[A-Za-z]+", text)
    if expected["hero"] not in words or expected["thing"] not in words:
        return False
    names = {word for word in words if word in NAMES}
    before = [word for word, following in itertools.pairwise(words) if following == expected["thing"]]
    colors = {word for word in words if word in COLORS}
    if len(names) != 1 or len(colors) != 1 or not before or set(before) - colors:
        return False
    return names == {expected.get("name", *names)} and colors == {expected.get("color", *colors)}


TEMPLATES = tuple(
    Template(name=f"story-{name}", draw=StoryTemplate(name=f"story-{name}", requests=requests).draw)
    for name, requests in REQUESTS.items()
)
