// Texts to begin with. Each takes up again what it said long before, which a model without memory has forgotten.

export const EXAMPLES = [
  ["A story", `The lighthouse keeper of Varnholm was called Ottoline Quist, and her dog was called Bramblewick.

Every evening Ottoline Quist climbed the hundred and twelve steps to the lamp, and Bramblewick climbed them behind her. The \
ships that passed Varnholm in the dark saw the light, and did not think of anybody.

One winter the oil ran out. The keeper sat on the steps and counted the ships that she could hear. "A light needs somebody to \
bring the oil," she said to the dog. The dog looked at the sea, where something was moving between the rocks.

It was a small boat, and in it stood a boy with a can of oil. "I saw no light," the boy shouted, "so I thought of you. Are you \
the lighthouse keeper of Varnholm? Are you Ottoline Quist?"

"I am Ottoline Quist," said the lighthouse keeper of Varnholm, "and this is my dog. The dog is called Bramblewick."
`],
  ["Code", `class TidalGauge:
    """Keeps the heights that a gauge has measured, in metres."""

    def __init__(self, station_name, heights_in_metres):
        self.station_name = station_name
        self.heights_in_metres = list(heights_in_metres)

    def add_measurement(self, height_in_metres):
        if height_in_metres is None:
            raise ValueError("the height must not be None")
        self.heights_in_metres.append(height_in_metres)

    def highest_measurement(self):
        return max(self.heights_in_metres)

    def lowest_measurement(self):
        return min(self.heights_in_metres)

    def __repr__(self):
        return f"TidalGauge({self.station_name!r}, {self.heights_in_metres!r})"


gauge = TidalGauge("Varnholm", [1.25, 3.5])
gauge.add_measurement(2.75)
print(gauge.highest_measurement(), gauge.lowest_measurement())
`],
  ["\u4e2d\u6587 and emoji", `\u5c0f\u732b\u53eb\u56e2\u56e2 \ud83d\udc08\uff0c\u5c0f\u72d7\u53eb\u65fa\u8d22 \ud83d\udc15\u3002
\u56e2\u56e2 \ud83d\udc08 \u559c\u6b22\u5403\u9c7c \ud83d\udc1f\uff0c\u65fa\u8d22 \ud83d\udc15 \u559c\u6b22\u5403\u9aa8\u5934 \ud83e\uddb4\u3002
\u65e9\u4e0a\uff0c\u56e2\u56e2 \ud83d\udc08 \u5728\u7a97\u53e3\u770b\u592a\u9633 \u2600\ufe0f\u3002\u665a\u4e0a\uff0c\u65fa\u8d22 \ud83d\udc15 \u5728\u95e8\u53e3\u770b\u6708\u4eae \ud83c\udf19\u3002
The cat is called \u56e2\u56e2 \ud83d\udc08 and the dog is called \u65fa\u8d22 \ud83d\udc15.
\u5c0f\u732b\u53eb\u4ec0\u4e48\uff1f\u5c0f\u732b\u53eb\u56e2\u56e2 \ud83d\udc08\uff0c\u56e2\u56e2 \ud83d\udc08 \u559c\u6b22\u5403\u9c7c \ud83d\udc1f\u3002
\u5c0f\u72d7\u53eb\u4ec0\u4e48\uff1f\u5c0f\u72d7\u53eb\u65fa\u8d22 \ud83d\udc15\uff0c\u65fa\u8d22 \ud83d\udc15 \u559c\u6b22\u5403\u9aa8\u5934 \ud83e\uddb4\u3002
`],
];
