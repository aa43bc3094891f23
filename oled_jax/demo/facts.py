"""Facts that the family "qa" asks about. True, small, and few enough for a small model to know by heart."""

# name: (symbol, atomic number)
ELEMENTS = {
    "hydrogen": ("H", 1), "helium": ("He", 2), "lithium": ("Li", 3), "carbon": ("C", 6), "nitrogen": ("N", 7),
    "oxygen": ("O", 8), "fluorine": ("F", 9), "neon": ("Ne", 10), "sodium": ("Na", 11), "magnesium": ("Mg", 12),
    "aluminium": ("Al", 13), "silicon": ("Si", 14), "phosphorus": ("P", 15), "sulfur": ("S", 16),
    "chlorine": ("Cl", 17), "argon": ("Ar", 18), "potassium": ("K", 19), "calcium": ("Ca", 20),
    "titanium": ("Ti", 22), "chromium": ("Cr", 24), "iron": ("Fe", 26), "cobalt": ("Co", 27), "nickel": ("Ni", 28),
    "copper": ("Cu", 29), "zinc": ("Zn", 30), "bromine": ("Br", 35), "silver": ("Ag", 47), "tin": ("Sn", 50),
    "iodine": ("I", 53), "tungsten": ("W", 74), "platinum": ("Pt", 78), "gold": ("Au", 79), "mercury": ("Hg", 80),
    "lead": ("Pb", 82), "radon": ("Rn", 86), "uranium": ("U", 92),
}  # fmt: skip

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Hungary": "Budapest", "Sweden": "Stockholm",
    "Norway": "Oslo", "Denmark": "Copenhagen", "Finland": "Helsinki", "Ireland": "Dublin", "Belgium": "Brussels",
    "Switzerland": "Bern", "Bulgaria": "Sofia", "Romania": "Bucharest", "Croatia": "Zagreb", "Serbia": "Belgrade",
    "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo", "Morocco": "Rabat", "Kenya": "Nairobi",
    "Ghana": "Accra", "Senegal": "Dakar", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Iran": "Tehran", "Iraq": "Baghdad", "Nepal": "Kathmandu",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia", "Peru": "Lima",
    "Chile": "Santiago", "Argentina": "Buenos Aires", "Colombia": "Bogota", "Ecuador": "Quito",
    "Australia": "Canberra", "New Zealand": "Wellington", "Iceland": "Reykjavik", "Jordan": "Amman",
}  # fmt: skip

CONTINENTS = {
    "Europe": ("France", "Germany", "Italy", "Spain", "Portugal", "Austria", "Greece", "Poland", "Hungary", "Sweden",
               "Norway", "Denmark", "Finland", "Ireland", "Belgium", "Switzerland", "Bulgaria", "Romania", "Croatia",
               "Serbia", "Ukraine", "Iceland"),
    "Africa": ("Egypt", "Morocco", "Kenya", "Ghana", "Senegal"),
    "Asia": ("Japan", "China", "India", "Thailand", "Vietnam", "Iran", "Iraq", "Nepal", "Jordan"),
    "North America": ("Canada", "Mexico", "Cuba"),
    "South America": ("Brazil", "Peru", "Chile", "Argentina", "Colombia", "Ecuador"),
}  # fmt: skip

# (how many of the small unit, small unit, one of the large unit)
UNITS = (
    (60, "seconds", "minute"), (60, "minutes", "hour"), (24, "hours", "day"), (7, "days", "week"),
    (12, "months", "year"), (10, "years", "decade"), (100, "years", "century"), (10, "millimeters", "centimeter"),
    (100, "centimeters", "meter"), (1000, "meters", "kilometer"), (1000, "grams", "kilogram"),
    (1000, "kilograms", "ton"), (1000, "milliliters", "liter"), (12, "inches", "foot"), (3, "feet", "yard"),
    (16, "ounces", "pound"), (8, "bits", "byte"), (12, "eggs", "dozen"), (100, "cents", "dollar"),
    (4, "quarts", "gallon"), (52, "weeks", "year with full weeks"), (1000, "watts", "kilowatt"),
    (360, "degrees", "full circle"), (90, "degrees", "right angle"),
)  # fmt: skip
