//! The words of keys, values and haystacks.

/// Adjectives of keys and values.
pub(super) const ADJECTIVES: [&str; 48] = [
    "able", "amber", "ancient", "awake", "bitter", "bold", "brave", "brief", "bright", "broad",
    "calm", "careful", "clever", "cold", "curious", "daring", "eager", "early", "faint", "fancy",
    "gentle", "golden", "grand", "happy", "heavy", "hidden", "honest", "hollow", "humble", "jolly",
    "keen", "late", "lively", "lonely", "lucky", "mellow", "modest", "narrow", "noble", "patient",
    "plain", "proud", "quiet", "rapid", "silver", "steady", "tender", "wild",
];

/// Nouns of keys and values.
pub(super) const NOUNS: [&str; 48] = [
    "anchor", "apple", "badger", "basket", "beacon", "bridge", "candle", "canyon", "castle",
    "cloud", "cotton", "dragon", "eagle", "ember", "falcon", "forest", "garden", "hammer",
    "harbor", "island", "jacket", "kettle", "ladder", "lantern", "lemon", "lion", "marble",
    "meadow", "mirror", "needle", "orchard", "otter", "pebble", "pepper", "pillow", "planet",
    "rabbit", "river", "saddle", "shadow", "spider", "temple", "thunder", "tiger", "valley",
    "violin", "walnut", "window",
];

/// The sentences that RULER repeats.
pub(super) const NOISE: &str = "The grass is green. The sky is blue. The sun is yellow. Here we \
                                   go. There and back again.";
