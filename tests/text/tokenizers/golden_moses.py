"""Makes moses.json: sentences, their words and what becomes of the words, by Hugging Face's tokenizer.

    python golden_moses.py

Needs transformers 4.37.2 and sacremoses 0.2.0, in an environment of their own.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SENTENCES = """
Hello (bracket)
Hello, my dog is cute
Hello, my dog
23,000 people are 1.80 m tall
23,000 people are 1.80m tall
1,234,567.89 in all, or 0.5, or .5 or 5. or 5,
In the 1980's and the 1990s' end, the '90s.
The well-known “Map” (1.80 m by 23,000 km) isn’t his.
It's his, isn't it? I've seen they'll go; she'd say so.
O'Neil's rock'n'roll; the players' names; James' and Jess's.
He said "Come in." and "Go", then 'so'.
She asked: "Why?" "Because," he said, "it is."
``Old quotes'' and `single' ones
«Voilà», dit-il. « Non » et «\u00a0oui\u00a0».
„Deutsche Anführung“ und ‚einfache‘ – ja — nein.
In the U.S. and at 3 a.m. Mr. B. Li left.
No. 5 came. No. It did not. Art. 7, pp. 3 and pp. x.
Dr. Who vs. Prof. X v. Y, e.g. this, i.e. that, etc. and so on.
He works for Corp. Inc. in St. Louis. Jan. 5 was Sun.
wait... what? wait.. what. . . no....
The end...
The end...'
The end.'
The end.'\u0020
'The end.'
"The end."
(The end.)
[The end.]
The end .
A sentence without an end
Mixed!?! marks?!! and;semi:colons
a,b,c,d and 1,2,3 and a,1 and 1,a and ,x and x, and ,, and ,
time 16:00, ratio 3:1, verse 3:16
50% of 50 % is 25 %; 5 ºC, 5\u00a0ºC, 5\u00a0cm, nº\u00a05
$3.50 or £5 or €1,000.00 or 5¢ or ¥7
a/b and/or 1/2 ½ x² H₂O №5
e-mail me@example.com or see http://www.example.com/a_b?c=d&e=f#g
snake_case and camelCase and C++ and C# and .NET and F-16
18- to 20-year-olds -- or so - went — far – away
pre-, post- and -fix; --option -o
<unk>-tipped <unk>, 4,<unk> and <unk>'s. <eos> <formula>
the <unk> of <unk>s
a < b > c <b>bold</b> & <i>it</i>
&amp; and &quot; are escapes; | pipes | and [brackets] {braces}
Café naïve Ærø Straße œuvre ﬁne ǅ
Cafe\u0301 and nai\u0308ve
Привет, мир! Это «тест».
Γειά σου Κόσμε· τι κάνεις;
日本語のテキスト。中文，句子！ 한국어 문장.
The Pokémon ポケモン and 日本
हिन्दी में एक वाक्य। தமிழ்
عربي ٣٫١٤ و ٢٥
emoji 😀 and ☃ and ♥ ™ © ®
Ⅳ and ⅷ and ⓐ and ① and ٣ and १२
zero\u200bwidth and no\u00a0break and thin\u2009space and \ufeffmark
5\u00a0000 and 5\u00a0%\u00a0! \u00a0? \u00a0; \u00a0: a,\u00a0b
tabs\tand   many   spaces \u0020
  = = Heading = = \u0020
= Heading =
x = y + z * 3 ^ 2 ~ 4
\\backslash and \\n
The year 2019–20 and 1914-18, pages 5–7
'Tis the season; 'twas; rock 'n' roll; the '80s
it 's and isn 't and @-@ and @,@ x
''double'' single '' quotes '
"unbalanced
a 'b' c 'd e
"a" "b" "c", 'x' "y 'z' w".
(nested (brackets [here] {there})).
(a)(b) (c) . (d) , ( e )
word(s) and word (s) and f(x)=g(y)
No.1 No. 1 No.x Nr. 5 Nos. 5 and 6
U.K.-based and U.S.-led a.m.-p.m.
A. B. Smith and J.R.R. Tolkien wrote.
etc., etc.; i.e., e.g., viz.
sentence one.Sentence two.sentence three
1.x x.1 1.2.3 v1.2.3 3.14159
100,000,000 1,00 ,5 5,.5
ALL CAPS HERE: NASA, U.N., N.A.T.O.
Mrs. Jones's dog's bone's end
don't can't won't I'm you're we've he'll she'd y'all ma'am o'clock
D'Artagnan l'homme qu'il aujourd'hui
1's 2's a's 5's
""".strip("\n").split("\n")

PARTS = """
a b é ß 日 본 я 5 12 ٣ ² ½ . . .. ... , , ' ' " ` '' “ ” ’ „ « » - – -- ( ) [ ] { } < > / | % $ € ? ! : ; … @ # & U.S.
Mr Mr. No. Art pp. i.e. Jan. s 's 't 'll x <unk> <eos> nº ºC cm ° ´ \u0948 ~ _ + = well-known it's 1980's players'
the of and known 1,000 3.5
"""


def main() -> None:
    from transformers.models.deprecated.transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer

    words = Path("words.txt")
    words.write_text("<eos>\n<unk>\n")
    tokenizer = TransfoXLTokenizer(vocab_file=str(words))
    words.unlink()
    draw = random.Random(1)
    parts = [*PARTS.split(), *8 * [" "]]
    drawn = ["".join(draw.choices(parts, k=draw.randint(3, 14))) for _ in range(400)]
    golden = []
    for text in [*SENTENCES, *drawn]:
        tokens = tokenizer.tokenize(text)
        golden.append([text, tokens, tokenizer.convert_tokens_to_string(tokens)])
    lines = ",\n".join(json.dumps(entry) for entry in golden)
    (Path(__file__).parent / "moses.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
