"""Notes as people write them, a rule, what it hides, and what must stay. `ADA` stands for the note of Ada Stone."""

USER = "# Me\n\n- friend: [[entities/ada.md|Ada Stone]]\n- sister: [[entities/bo.md|Bo Ek]]\n- hobby: chess\n"
BO = "# Bo Ek\n\n- hobby: kites\n- colour: teal\n"

ALLERGY = "hide: [{note: Ada Stone, label: allergy}]"
DIAGNOSIS = "hide: [{note: Ada Stone, label: diagnosis}]"
PASSWORDS = "hide: [{label: password}]"
SALARY = "hide: [{note: Ada Stone, label: salary}]"
EMPLOYER = "hide: [{note: Ada Stone, label: employer}]"
MONEY = "hide: [{category: money}]"
PHONES = "hide: [{category: phone}]"
DATES = "hide: [{category: date}]"
EMAILS = "hide: [{category: email}]"
ADDRESSES = "hide: [{label: address}]"
NUMBERS = "hide: [{category: number}]"
ONLY_PHONE = "only: [{note: Ada Stone, label: phone}]"

# Name -> the body of Ada's note, or the notes; the rule; what is hidden; what stays.
LABELS = {
    "plain": ("- allergy: peanuts\n- city: Bern\n", ALLERGY, ["peanuts"], ["city: Bern"]),
    "bold": ("* **Allergy**: peanuts\n* __city__: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "plural": ("- allergies: peanuts and dust\n- city: Bern\n", ALLERGY, ["peanuts", "dust"], ["Bern"]),
    "kind": ("- food allergy: peanuts\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts", "dust"], ["Bern"]),
    "label tells": ("- peanut allergy: severe\n- allergy: dust\n", ALLERGY, ["peanut", "severe", "dust"], []),
    "task": ("- [ ] allergy: milk\n- [x] city: Bern\n", ALLERGY, ["milk"], ["Bern"]),
    "numbered": ("1. allergy: soy\n2. city: Bern\n", ALLERGY, ["soy"], ["Bern"]),
    "quote": ("> allergy: eggs\n> city: Bern\n\n- allergy: dust\n", ALLERGY, ["eggs", "dust"], ["Bern"]),
    "quote nested": ("> > allergy: eggs\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["eggs"], ["Bern"]),
    "comment": ("<!-- allergy: walnuts -->\n- allergy: dust\n- city: Bern\n", ALLERGY, ["walnuts"], ["Bern"]),
    "long comment": ("<!--\nallergy: walnuts\n-->\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["walnuts"], ["Bern"]),
    "percent comment": ("%% allergy: walnuts %%\n- allergy: dust\n- city: Bern\n", ALLERGY, ["walnuts"], ["Bern"]),
    "dataview": ("allergy:: peanuts\n\n(allergy:: dust)\n\n- city: Bern\n", ALLERGY, ["peanuts", "dust"], ["Bern"]),
    "equals": ("allergy = peanuts\n\n- allergy: x1\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "dash": ("Allergy – peanuts\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "arrow": ("- allergy → peanuts\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "other name": ("- intolerance: peanuts\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "two values": ("- password: hunter2 (old: hunter1)\n- city: Bern\n", PASSWORDS, ["hunter2", "hunter1"], ["Bern"]),
    "no such line": (
        {
            "entities/ada.md": "# Ada Stone\n\nShe gets by on eighty a week.\n\n- city: Bern\n",
            "c.md": "# C\n\n- salary: 10\n",
        },
        SALARY,
        ["eighty", "Bern"],
        ["salary: 10"],
    ),
    "empty label": ("- allergy:\n- city: Bern\n\nShe is allergic to cats.\n", ALLERGY, ["cats"], []),
    "inline html": ("<b>Allergy</b>: peanuts\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "definition": ("Allergy\n: peanuts\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "footnote": ("Allergy[^1]\n\n[^1]: peanuts\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "pay": ("- pay: a lot, 4711 a month\n- salary: good\n- city: Bern\n", SALARY, ["4711"], ["Bern"]),
    "colon in bold": ("- **Allergy:** peanuts\n- **City:** Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "emoji": ("🥜 Allergy: peanuts\n\n🏠 City: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "remark": (
        "- allergy (severe): peanuts\n- allergy: dust\n- city: Bern\n",
        ALLERGY,
        ["peanuts", "severe"],
        ["Bern"],
    ),
    "marked": ("==Allergy: peanuts==\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "question": ("Allergies? Peanuts.\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "in a heading": ("## Allergy: peanuts\n\n- allergy: dust\n\n## City\n\nBern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "image": ("![peanut allergy](nuts.png)\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanut", "nuts"], ["Bern"]),
    "adjective": ("Ada is allergic to peanuts.\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "pins": ("- PIN: 4711\n- city: Bern\n", "hide: [{note: Ada Stone, label: PIN}]", ["4711"], ["Bern"]),
}
NESTING = {
    "nested": ("- allergies:\n  - peanuts\n  - dust\n- city: Bern\n", ALLERGY, ["peanuts", "dust"], ["Bern"]),
    "nested under a value": (
        "- allergies: cats\n  - peanuts\n  - dust\n- city: Bern\n",
        ALLERGY,
        ["cats", "peanuts", "dust"],
        ["Bern"],
    ),
    "nested twice": ("- health\n  - allergy\n    - peanuts\n  - allergy: x1\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "tab": ("- allergies: cats\n\t- peanuts\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "numbered nested": ("1. allergies: cats\n   1. peanuts\n2. city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "quoted nested": ("> - allergies: cats\n>   - peanuts\n> - city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "wrapped": ("- allergy: peanuts,\n  shellfish and\n  dust\n- city: Bern\n", ALLERGY, ["shellfish", "dust"], ["Bern"]),
    "wrapped lazily": ("- allergy: peanuts,\nshellfish and\ndust\n- city: Bern\n", ALLERGY, ["shellfish", "dust"], ["Bern"]),
    "wrapped text": ("Her allergy is to\npeanuts, mostly.\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "paragraph below": ("- allergy: cats\n\n  Also peanuts.\n\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "pronoun": ("She has an allergy.\n\nIt is peanuts.\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "same paragraph": ("Her allergy is bad. Peanuts could kill her.\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "list after colon": ("Allergies:\n\n- peanuts\n- eggs\n\nOther.\n\n- allergy: dust\n", ALLERGY, ["peanuts", "eggs"], []),
    "bold line": ("**Allergies**\n\n- peanuts\n\nOr eggs.\n\n**City**\n\nBern\n\n- allergy: dust\n", ALLERGY, ["peanuts", "eggs"], ["Bern"]),
    "paragraphs after colon": ("- allergy: dust\n\nAllergies:\n\npeanuts\n\neggs\n\n## City\n\nBern\n", ALLERGY, ["peanuts", "eggs"], ["Bern"]),
    "bold line, table": ("- allergy: dust\n\n**Allergies**\n\n| a | b |\n|---|---|\n| peanuts | bad |\n\nAnd eggs.\n\n**City**\n\nBern\n", ALLERGY, ["peanuts", "eggs"], ["Bern"]),
    "callout": ("> [!warning] Allergies\n> peanuts\n> and eggs\n\nOther.\n\n- allergy: dust\n", ALLERGY, ["peanuts", "eggs"], []),
    "section": ("- allergy: dust\n\n## Allergies\n\npeanuts\n\neggs\n\n## City\n\nBern\n", ALLERGY, ["peanuts", "eggs"], ["Bern"]),
    "subsection": ("- allergy: dust\n\n## Allergies\n\n### Food\n\npeanuts\n\n## City\n\nBern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "underlined": ("- allergy: dust\n\nAllergies\n---------\n\npeanuts\n\nCity\n----\n\nBern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "section of items": ("- password: x1y2\n\n## Passwords\n\n- bank: hunter2\n\n## City\n\n- town: Bern\n", PASSWORDS, ["hunter2"], ["Bern"]),
    "section, other note": (
        {"entities/ada.md": "# Ada Stone\n\n## Passwords\n\n- bank: letmein\n\n## City\n\nBern\n", "c.md": "# C\n\n- password: zzz\n"},
        PASSWORDS,
        ["letmein", "zzz"],
        ["Bern"],
    ),
    "by name elsewhere": (
        {"entities/ada.md": "# Ada Stone\n\n- allergy: dust\n", "log.md": "# Log\n\n## Ada\n\n- allergy: peanuts\n\n## Bo\n\n- allergy: pollen\n"},
        ALLERGY,
        ["peanuts", "dust"],
        ["pollen"],
    ),
    "nested by name": (
        {"entities/ada.md": "# Ada Stone\n\n- allergy: dust\n", "log.md": "# Log\n\n- Ada Stone\n  - allergy: peanuts\n- Bo Ek\n  - allergy: pollen\n"},
        ALLERGY,
        ["peanuts"],
        ["pollen"],
    ),
}  # fmt: skip
BLOCKS = {
    "table of facts": ("| what | value |\n|---|---|\n| allergy | peanuts |\n| city | Bern |\n", ALLERGY, ["peanuts"], ["Bern"]),
    "three columns": ("| thing | value | since |\n|---|---|---|\n| allergy | peanuts | birth |\n| city | Bern | now |\n", ALLERGY, ["peanuts"], ["Bern"]),
    "head row": ("| name | allergy | city |\n|---|---|---|\n| Ada Stone | peanuts | Bern |\n\n- allergy: dust\n", ALLERGY, ["peanuts"], ["Bern"]),
    "passwords": ("| site | password |\n|---|---|\n| bank | hunter2 |\n| mail | letmein |\n\n- password: zzz\n", PASSWORDS, ["hunter2", "letmein"], ["bank"]),
    "no outer bars": ("site | password\n--- | ---\nbank | letmein\n\n- password: zzz\n", PASSWORDS, ["letmein"], ["bank"]),
    "no head": ("| allergy | peanuts |\n| city | Bern |\n", ALLERGY, ["peanuts"], ["Bern"]),
    "number first": ("| 1 | allergy | peanuts |\n| 2 | city | Bern |\n\n- allergy: dust\n", ALLERGY, ["peanuts"], ["Bern"]),
    "family": (
        {
            "user.md": "# Me\n\n| who | phone | city |\n|---|---|---|\n| [[entities/ada.md\\|Ada Stone]] | 555-0101 | Bern |\n",
            "entities/ada.md": "# Ada Stone\n\n- phone: +41 79 555 0101\n",
        },
        "hide: [{note: Ada Stone, label: phone}]",
        ["555-0101"],
        ["Bern"],
    ),
    "years": ("| year | salary |\n|---|---|\n| 2020 | 100,000 |\n| 2021 | 120,000 |\n\n- salary: see table\n", SALARY, ["100,000", "120,000"], ["2020"]),
    "fence": ("```\nallergy = peanuts\n```\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "json": ('```json\n{\n  "allergies": [\n    "peanuts"\n  ]\n}\n```\n\n- allergy: dust\n- city: Bern\n', ALLERGY, ["peanuts"], ["Bern"]),
    "csv": ("```\nsite,password\nbank,letmein\n```\n\n- password: zzz\n- city: Bern\n", PASSWORDS, ["letmein"], ["Bern"]),
    "indented code": ("    allergy = peanuts\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "html table": ("<table>\n<tr><td>Allergy</td>\n<td>peanuts</td></tr>\n</table>\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "details": ("<details>\n<summary>Allergies</summary>\n\n- peanuts\n\n</details>\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "comment of paragraphs": ("<!-- Allergies\n\npeanuts\n-->\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "percent paragraphs": ("%%\nAllergies\n\npeanuts\n%%\n\n- allergy: dust\n- city: Bern\n", ALLERGY, ["peanuts"], ["Bern"]),
    "front matter": ({"entities/ada.md": "---\nallergies:\n  - peanuts\n  - dust\ncity: Bern\n---\n# Ada Stone\n"}, ALLERGY, ["peanuts", "dust"], ["Bern"]),
    "front matter flat": ({"entities/ada.md": "---\nallergies:\n- peanuts\ncity: Bern\n---\n# Ada Stone\n"}, ALLERGY, ["peanuts"], ["Bern"]),
    "front matter list": ({"entities/ada.md": "---\nallergies: [peanuts, dust]\ncity: Bern\n---\n# Ada Stone\n"}, ALLERGY, ["peanuts", "dust"], ["Bern"]),
    "tags": ({"entities/ada.md": "---\ntags: [lupus]\naliases: [The Lupus Lady]\n---\n# Ada Stone\n\n- diagnosis: lupus\n- city: Bern\n"}, DIAGNOSIS, ["lupus"], ["Bern"]),
    "hash tag": ("#lupus #friend\n\n- diagnosis: lupus\n- city: Bern\n", DIAGNOSIS, ["lupus"], ["Bern"]),
    "heading": ("- diagnosis: lupus\n- city: Bern\n\n## Living with Lupus\n\nSee [[entities/bo.md]].\n", DIAGNOSIS, ["lupus"], ["Bern"]),
    "alias": (
        {"user.md": "# Me\n\n- friend: [[entities/ada.md|Ada, who has lupus]]\n- hobby: chess\n", "entities/ada.md": "# Ada Stone\n\n- diagnosis: lupus\n"},
        DIAGNOSIS,
        ["lupus"],
        ["chess"],
    ),
    "web link": ("- diagnosis: lupus\n- city: Bern\n\nSee [this](https://example.com/lupus-help).\n", DIAGNOSIS, ["lupus"], ["Bern"]),
    "other fact": ("- children: Tom, Kim\n- school: the one of Tom\n- city: Bern\n", "hide: [{note: Ada Stone, label: children}]", ["Tom", "Kim"], ["Bern"]),
    "part of a value": ("- employer: Contoso Ltd.\n- city: Bern\n\nBadge of Contoso: blue.\n", EMPLOYER, ["Contoso"], ["Bern"]),
    "in prose": ("- employer: Contoso Ltd.\n- city: Bern\n\nAda came from Contoso late.\n", EMPLOYER, ["Contoso"], ["Bern"]),
    "width": ("- diagnosis: lupus\n- city: Bern\n\nlu\u200bpus; ｌｕｐｕｓ\n", DIAGNOSIS, ["lupus", "ｌｕｐｕｓ", "lu\u200bpus"], ["Bern"]),
    "file name": (
        {"entities/ada.md": "# Ada Stone\n\n- diagnosis: lupus\n- doctor: [[lupus_clinic]]\n", "entities/lupus_clinic.md": "# Clinic\n\n- patient: [[entities/ada.md]]\n- town: Bern\n"},
        DIAGNOSIS,
        ["lupus"],
        ["town: Bern"],
    ),
    "file of a number": (
        {"entities/ada.md": "# Ada Stone\n\n- sheet: [[41795550101]]\n", "entities/x/41795550101.md": "# Sheet\n\n- who: [[entities/ada.md]]\n"},
        PHONES,
        ["41795550101", "5550101"],
        ["# Sheet"],
    ),
    "daily note": ({"daily/2024-05-31.md": "# Rain\n\nWe read.\n", "entities/ada.md": "# Ada Stone\n\nSee [[2024-05-31]].\n"}, DATES, ["2024-05-31", "2024"], ["We read."]),
}  # fmt: skip


def _kind(rule, *values, kept="- city: Bern"):
    body = "".join(f"- {value}\n" for value in values)
    return f"{body}- city: Bern\n", rule, [value.rpartition(": ")[2] for value in values], [kept]


CATEGORIES = {
    "money codes": _kind(MONEY, "x: CHF 120,000", "y: 5000 SEK", "z: Rs. 400", "w: 3.50 CAD"),
    "money words": _kind(MONEY, "x: 900 francs", "y: five hundred euros", "z: fifty bucks", "w: 3 million dollars"),
    "money signs": _kind(MONEY, "x: ¥50000", "y: 5k€", "z: 1.200,50 €", "w: ₹ 900"),
    "money labels": _kind(MONEY, "salary: 4711 a month", "rent: a lot", "monthly fee: 12", "net worth: 3.4"),
    "money in prose": ("She paid 30 francs and 12 quid in Bern.\n", MONEY, ["30", "12"], ["in Bern"]),
    "phone labels": _kind(PHONES, "cell: 555-0101", "tel: 044 123", "whatsapp: 5550101", "work telephone: 12 13 14"),
    "phone long": _kind(PHONES, "x: 0041.44.1234567 ext 12", "y: (044) 123-45-67", "z: +41·79·555·0101", "w: 079/555 01 01"),
    "phone in prose": ("Call 555-0101 or ring 044 12 any time.\n\nIn Bern.\n", PHONES, ["555-0101", "044 12"], ["Bern"]),
    "phone in words": ("Call zero seven nine, five five five, oh one.\n\n- city: Bern\n", PHONES, ["seven nine", "five five"], ["Bern"]),
    "phone link": ("[ring](tel:+41795550101)\n\n- city: Bern\n", PHONES, ["5550101"], ["Bern"]),
    "date forms": _kind(DATES, "x: 31/05/1990", "y: 2010/06/01", "z: 31 May", "w: 31.5.90", "v: May 31", "u: 2010-06"),
    "date words": _kind(DATES, "x: 31st of May in 1990", "y: Spring 2020", "z: 3. Mai 1990", "w: Monday", "v: 1990", "u: 3 de mayo"),
    "date labels": _kind(DATES, "born: the day of the flood", "wedding: midsummer", "due: soon"),
    "date in prose": ("She came on 31/05 and left in October.\n\n- city: Bern\n", DATES, ["31/05", "October"], ["Bern"]),
    "email forms": _kind(EMAILS, "x: ada@localhost", "y: ada (at) example.com", "z: ada at example dot com", "w: ада@пример.рф"),
    "email quoted": _kind(EMAILS, 'x: "ada stone"@example.com', "y: ada\\@example.com", "z: ada.stone＠example.com", "w: ada%2Ex%40example.com"),
    "email labels": _kind(EMAILS, "mail: ada, the usual one", "gmail: adaxy"),
    "address forms": _kind(ADDRESSES, "x: Bahnhofstrasse 12, 8001 Zürich", "y: 12 Rue de la Paix", "z: 5 Elm St", "w: 221B Baker Street"),
    "address labels": _kind(ADDRESSES, "home: the red barn", "lives: by the lake", "location: upstairs", "flat: third door"),
    "address in prose": ("She moved to Via Roma 4 and 8001 Zürich.\n\n- colour: red\n", ADDRESSES, ["Via Roma", "8001"], ["red"]),
    "number words": _kind(NUMBERS, "age: thirty-four", "shoe: forty two", "size: XII", "frac: 1/2", "ver: v12"),
    "phone table": ("| who | cell |\n|---|---|\n| Ada | 12 13 |\n\n- city: Bern\n", PHONES, ["12 13"], ["Bern"]),
    "phone section": ("## Phone numbers\n\n- work: 12 13\n- home: 14 15\n\n## City\n\nBern\n", PHONES, ["12 13", "14 15"], ["Bern"]),
    "phone nested": ("- phones:\n  - 12 13\n  - 14 15\n- city: Bern\n", PHONES, ["12 13", "14 15"], ["Bern"]),
    "salary of one, respelled": (
        "- salary: 120,000 EUR\n- city: Bern\n\nThat is 120k, or one hundred twenty thousand.\n",
        SALARY,
        ["120", "hundred twenty"],
        ["Bern"],
    ),
    "phone of one, respelled": (
        "- phone: +41 79 555 0101\n- city: Bern\n\nOr 079 555 01 01, at home.\n",
        "hide: [{note: Ada Stone, label: phone}]",
        ["555"],
        ["Bern"],
    ),
}  # fmt: skip
ALLOWED = {
    "headings": ("- phone: +41 79 555 0101\n- salary: 12 EUR\n\n## Lupus\n\n# Ada has lupus\n", ONLY_PHONE, ["lupus", "12 EUR"], ["+41 79 555 0101"]),
    "labels": ("- phone: +41 79 555 0101\n- HIV medication: Xyz\n", ONLY_PHONE, ["HIV", "Xyz"], ["+41 79 555 0101"]),
    "code": ("- phone: +41 79 555 0101\n\n```\nlupus\n```\n\n<!-- lupus -->\n\n> lupus\n", ONLY_PHONE, ["lupus"], ["+41 79 555 0101"]),
    "table": ("| what | value |\n|---|---|\n| phone | +41 79 555 0101 |\n| illness | lupus |\n", ONLY_PHONE, ["lupus"], ["+41 79 555 0101"]),
    "alias": (
        {"user.md": "# Me\n\nI met [[entities/ada.md|the lupus lady]] and [[entities/bo.md|Bo Ek]].\n", "entities/ada.md": "# Ada Stone\n\n- phone: +41 79 555 0101\n"},
        ONLY_PHONE,
        ["lupus"],
        ["+41 79 555 0101", "[[entities/bo.md|Bo Ek]]"],
    ),
    "someone else's": ("- phone: +41 79 555 0101\n- Tom:\n  - phone: +41 79 777 8888\n\n## Mother\n\n- phone: +41 79 666 9999\n", ONLY_PHONE, ["777", "666", "Tom", "Mother"], ["+41 79 555 0101"]),
    "section of contact": ("## Contact\n\n- phone: +41 79 555 0101\n- city: Bern\n", ONLY_PHONE, ["Bern"], ["+41 79 555 0101"]),
    "tags": ({"entities/ada.md": "---\ntags: [lupus]\nphone: +41 79 555 0101\n---\n# Ada Stone\n"}, ONLY_PHONE, ["lupus"], ["+41 79 555 0101"]),
}  # fmt: skip
CASES = {
    f"{group}: {name}": case
    for group, cases in (
        ("label", LABELS), ("nesting", NESTING), ("block", BLOCKS), ("category", CATEGORIES), ("allowed", ALLOWED),
    )
    for name, case in cases.items()
}  # fmt: skip
UNCOVERED = {
    "label: other name", "label: empty label", "label: footnote", "label: pay", "label: adjective", "nesting: pronoun",
    "block: part of a value", "block: in prose", "category: money words", "category: money labels",
    "category: phone labels", "category: phone in prose", "category: phone in words", "category: date words",
    "category: date labels", "category: email forms",  "category: email labels",
    "category: address forms", "category: address labels", "category: address in prose", "category: number words",
    "category: phone table", "category: phone section", "category: phone nested",
    "category: salary of one, respelled",
}  # fmt: skip
"""Facts that a rule does not cover: they use other words than the rule, or lack the form of its category (SECURITY.md)."""
IN_NOTES = {
    "label: label tells", "label: no such line", "label: question", "label: image", "nesting: wrapped",
    "nesting: wrapped lazily", "nesting: paragraph below", "nesting: same paragraph", "nesting: bold line",
    "nesting: bold line, table", "nesting: callout", "block: html table",
}  # fmt: skip
"""Values inside of hidden sentences, which replies are not searched for."""


def notes(case):
    """The notes of a case."""
    body = case[0]
    own = {"entities/ada.md": f"# Ada Stone\n\n{body}"} if isinstance(body, str) else body
    return {"user.md": USER, "entities/bo.md": BO, **own}
