// What a token attends to: probabilities by layer, head and distance, as the server gives them.

// Return the probabilities by distance of a layer and head, or their mean where the layer or the head is "".
export function meanAttention(attention, layer, head) {
  const layers = layer === "" ? attention : [attention[layer]];
  const heads = layers.flatMap((one) => head === "" ? one : [one[head]]);
  return heads[0].map((_, distance) => heads.reduce((sum, one) => sum + one[distance], 0) / heads.length);
}

// Return the distances with the highest probabilities, the highest first.
export function strongestKeys(weights, number) {
  return weights.map((_, distance) => distance).sort((first, second) => weights[second] - weights[first]).slice(0, number);
}
