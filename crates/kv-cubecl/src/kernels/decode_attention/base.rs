use cubecl::{
    features::Plane,
    ir::{DeviceProperties, ElemType, FloatKind},
};

use crate::{
    Error, Result,
    layout::{CacheLayout, Granularity, QuantSpec, Sides},
    scores::Scores,
};

/// Largest head_dim of the attention kernels.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// Shared memory that WebGPU guarantees, in bytes.
pub(crate) const SHARED_BYTES: usize = 16 * 1024;

/// Units that a streaming multiprocessor runs at once. A launch has about as many as run at once on
/// the whole device, as fewer splits leave fewer partial results to merge. Registers allow 256
/// units with 4 query rows; an estimate, not measured.
const UNITS_PER_MULTIPROCESSOR: usize = 256;

/// Tokens whose packed values a unit loads before it adds the first of them, so that it waits for
/// memory once.
pub(super) const VALUES_AT_ONCE: usize = 4;

/// Most query rows whose sums a unit keeps in registers.
const MAX_ROWS: usize = 4;

/// Most units that share the channels of a token: enough for 128 consecutive bytes.
const MAX_LANES: usize = 8;

/// Units per cube that WebGPU guarantees.
const MAX_UNITS: usize = 256;

/// Attention of `rows` query rows per (batch, kv head) over the first `tokens` tokens of a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeProblem {
    /// The cache.
    pub(crate) layout: CacheLayout,
    /// Tokens in the cache.
    pub(crate) len: usize,
    /// Tokens to attend to, at most `len`.
    pub(crate) tokens: usize,
    /// Query rows per (batch, kv head): query heads per kv head times query tokens.
    pub(crate) rows: usize,
    /// Type of the float rows.
    pub(crate) float: ElemType,
    /// Type of query and output.
    pub(crate) query: ElemType,
    /// Scale and soft cap of the scores.
    pub(crate) scores: Scores,
}

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DecodeBlueprint {
    /// Channels of keys and of values.
    pub(crate) head_dim: Sides<usize>,
    /// Query rows per cube.
    pub(crate) rows: usize,
    /// Quantization of keys and values, if any.
    pub(crate) specs: Sides<Option<QuantSpec>>,
    /// Units per cube.
    pub(crate) units: usize,
    /// Channels read at once: 4, or 1 where rows are not a multiple of 4 wide.
    pub(crate) vector: usize,
    /// Consecutive tokens whose scores a unit computes.
    pub(crate) unit_tokens: usize,
    /// Consecutive channels of the output that a unit adds to.
    pub(crate) unit_channels: usize,
    /// Units that share the channels of a token: a power of two, above 1 only with planes.
    pub(crate) lanes: usize,
    /// Units per plane, 1 without planes.
    pub(crate) plane: usize,
    /// See [`Grid::flat`](crate::kernels::Grid::flat).
    pub(crate) flat: bool,
    /// True if a sliding window may hide tokens, so packed tokens are in a ring.
    pub(crate) window: bool,
    /// True for a side that is stored after the Hadamard transform. The query is transformed for
    /// keys, and the transform of values is undone in the output.
    pub(crate) hadamard: Sides<bool>,
    /// True if scores have a soft cap.
    pub(crate) softcap: bool,
    /// True if there is one split, whose sums are the result.
    pub(crate) whole: bool,
}

impl DecodeBlueprint {
    /// Tokens of packed keys that are read from the first of them on: those of a group.
    pub(super) fn key_block_tokens(&self) -> usize {
        self.specs.keys.map_or(1, |spec| spec.block_tokens())
    }

    /// Tokens whose weights are in shared memory at once.
    pub(super) const fn tile(&self) -> usize {
        self.units / self.lanes * self.unit_tokens
    }

    /// Number of units that work on the same block of channels, each on its share of the tokens.
    pub(super) const fn strides(&self) -> usize {
        self.units / (self.head_dim.values / self.unit_channels)
    }

    /// Entries per row of the shared array for reductions: one per plane.
    pub(super) const fn stat_entries(&self) -> usize {
        self.units / self.plane
    }

    /// Entries of the shared array for the scores of a tile, later for one row of outputs and sums
    /// of all units.
    pub(super) fn scratch_len(&self) -> usize {
        (self.rows * self.tile()).max(self.strides() * self.head_dim.values + self.units)
    }

    fn shared_bytes(&self) -> usize {
        let rows = self.rows * (self.head_dim.keys + self.stat_entries());
        4 * (rows + self.scratch_len())
    }
}

/// Division of the work over cubes, at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) row_chunks: usize,
    pub(super) n_splits: usize,
}

/// Deals out `n_tiles` to at most `wanted` splits: how many splits there are, each with a tile or
/// more, and how many tiles each gets (the last may get fewer).
pub(crate) fn splits(n_tiles: usize, wanted: usize) -> (usize, usize) {
    let tiles_per_split = n_tiles.div_ceil(wanted.min(n_tiles));
    (n_tiles.div_ceil(tiles_per_split), tiles_per_split)
}

/// The properties of a device that a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hardware {
    pub(crate) n_multiprocessors: usize,
    /// Units per plane if they can exchange values, else 1.
    pub(super) plane: usize,
}

impl Hardware {
    /// The least that a device offers: one multiprocessor, no exchange of values between units of a
    /// plane.
    const PLAIN: Self = Self { n_multiprocessors: 1, plane: 1 };

    pub(crate) fn of(properties: &DeviceProperties) -> Self {
        let hardware = &properties.hardware;
        let sizes = (hardware.plane_size_min, hardware.plane_size_max);
        // A plan needs to know the size of a plane; some devices choose it for each kernel.
        let known = sizes.0 == sizes.1 && properties.features.plane.contains(Plane::Ops);
        let plane = if known { sizes.0 as usize } else { 1 };
        // 16 is a guess for devices that do not report it.
        let n_multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(16) as usize;
        Self { n_multiprocessors, plane }
    }
}

/// Plans a launch.
pub(super) fn prepare(
    problem: &DecodeProblem,
    hardware: Hardware,
) -> Result<(DecodeBlueprint, Settings)> {
    let layout = &problem.layout;
    let (config, head_dim) = (layout.config(), layout.shape().head_dim);
    let Sides { keys: key_dim, values: value_dim } = head_dim;
    let widest = key_dim.max(value_dim);
    let unsupported = |why: String| Error::Unsupported {
        what: format!("decode_attention of cache {config} at head_dim {widest}"),
        why,
    };
    if widest > MAX_HEAD_DIM {
        return Err(unsupported(format!("head_dim is above {MAX_HEAD_DIM}")));
    }
    let specs = layout.specs();
    // A run of elements shares the scale and minimum of one parameter word. So runs are long,
    // consist of whole code words, and lie within one group.
    let run = |grouped: Option<QuantSpec>, axis: usize| match grouped {
        None => [8, 4, 2, 1].into_iter().find(|&n| axis.is_multiple_of(n)).unwrap_or(1),
        Some(QuantSpec { group_size, .. }) => {
            [16, 8, 4].into_iter().find(|&n| group_size.is_multiple_of(n)).unwrap_or(4)
        }
    };
    // Tokens that are packed one by one have nothing in common.
    let grouped_keys = specs.keys.filter(|spec| spec.granularity == Granularity::PerChannel);
    // If keys are packed by token: the words of a row that hold low bits.
    let token_keys = specs.keys.filter(|spec| spec.granularity == Granularity::PerToken);
    let key_words = token_keys.map_or(key_dim, |spec| key_dim / spec.codes_per_word());
    let vectors = [key_dim, value_dim, key_words].iter().all(|&n| n.is_multiple_of(4))
        && !token_keys.is_some_and(|spec| spec.splits_codes());
    let mut blueprint = DecodeBlueprint {
        head_dim,
        rows: problem.rows.min(MAX_ROWS),
        specs,
        units: if hardware.plane > 1 { 128.max(hardware.plane) } else { 64 },
        vector: if vectors { 4 } else { 1 },
        unit_tokens: run(grouped_keys, 8),
        unit_channels: run(specs.values, value_dim),
        lanes: 1,
        plane: hardware.plane,
        flat: false,
        window: layout.config().sliding_window.is_some(),
        hadamard: Sides::from_fn(|side| config.uses_hadamard(side)),
        softcap: problem.scores.softcap.is_some(),
        whole: false,
    };
    // Neighboring units read neighboring vectors of a token.
    while 2 * blueprint.lanes <= hardware.plane.min(MAX_LANES)
        && (key_dim / blueprint.vector).is_multiple_of(2 * blueprint.lanes)
        && (key_words / blueprint.vector).is_multiple_of(2 * blueprint.lanes)
    {
        blueprint.lanes *= 2;
    }
    while blueprint.units < value_dim / blueprint.unit_channels {
        blueprint.units *= 2;
    }
    // First shorter tiles, then fewer rows per cube: with fewer rows the cache is read more than
    // once.
    let blocks = value_dim / blueprint.unit_channels;
    let fewest_units = blocks.max(32).max(blueprint.plane);
    while blueprint.shared_bytes() > SHARED_BYTES && blueprint.units / 2 >= fewest_units {
        blueprint.units /= 2;
    }
    while blueprint.shared_bytes() > SHARED_BYTES && blueprint.rows > 1 {
        blueprint.rows = blueprint.rows.div_ceil(2);
    }
    // Smaller cubes where the tokens are too few to occupy the device; a few sizes, so that a
    // growing context compiles few kernels.
    let sinks = config.sink_tokens.min(problem.tokens);
    let row_chunks = problem.rows.div_ceil(blueprint.rows);
    let wanted_splits = |blueprint: &DecodeBlueprint| {
        let cubes = UNITS_PER_MULTIPROCESSOR * hardware.n_multiprocessors / blueprint.units;
        (cubes / (layout.slices() * row_chunks)).max(1)
    };
    let begin = layout.schedule().begin(problem.tokens).min(problem.tokens);
    let after_sinks = problem.tokens - begin.max(sinks);
    let first_float = layout.schedule().first_float(problem.len).keys;
    let packed = first_float.saturating_sub(begin).min(after_sinks);
    let tokens = [sinks, packed, after_sinks - packed];
    let n_tiles =
        |blueprint: &DecodeBlueprint| tokens.iter().map(|n| n.div_ceil(blueprint.tile())).sum();
    while n_tiles(&blueprint) < wanted_splits(&blueprint) && blueprint.units / 2 >= fewest_units {
        blueprint.units /= 2;
    }
    if blueprint.units > MAX_UNITS || blueprint.shared_bytes() > SHARED_BYTES {
        return Err(unsupported(format!("needs {blueprint:?}, beyond WebGPU's limits")));
    }
    let (n_splits, _) = splits(n_tiles(&blueprint), wanted_splits(&blueprint));
    // Sums are f32 and written as they are.
    blueprint.whole = n_splits == 1 && problem.query == ElemType::Float(FloatKind::F32);
    Ok((blueprint, Settings { row_chunks, n_splits }))
}

/// Checks that a cache of this layout can be attended to on any device.
///
/// # Errors
/// [`Error::Unsupported`].
pub(crate) fn check(layout: &CacheLayout) -> Result<()> {
    let float = ElemType::Float(FloatKind::F32);
    let problem = DecodeProblem {
        layout: *layout,
        len: 1,
        tokens: 1,
        rows: 1,
        float,
        query: float,
        scores: Scores::PLAIN,
    };
    prepare(&problem, Hardware::PLAIN).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheShape, KvCacheConfig};

    #[test]
    fn layouts_that_do_not_fit_are_errors() {
        let layout = |name: &str, head_dim| {
            let shape = CacheShape::new(1, 1, head_dim);
            CacheLayout::new(&name.parse().unwrap(), shape).unwrap()
        };
        assert!(check(&layout("k2v2", 256)).is_ok());
        assert!(check(&layout("k2v16-g4096-r4096", 64)).is_ok());
        let message = check(&layout("k2v2", 288)).unwrap_err().to_string();
        assert!(message.contains("head_dim is above 256"), "{message}");
    }

    /// Channels of keys and of values.
    const KEYS_AND_VALUES: [(usize, usize); 13] = [
        (16, 16),
        (40, 40),
        (48, 48),
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (240, 240),
        (256, 256),
        (192, 128),
        (48, 256),
        (256, 32),
        (18, 64),
    ];

    /// Every plan, on every kind of device, is within WebGPU's limits and consistent.
    #[test]
    fn plans_fit_and_their_parts_divide() {
        for name in [
            "float",
            "k8v8",
            "k4v4-g8-r8",
            "k4v2",
            "k2v4-g48-r48",
            "k2v16",
            "k16v8",
            "kint8vint8",
            "k4vint8",
            "ktq3vtq3",
        ] {
            for (key_dim, value_dim) in KEYS_AND_VALUES {
                let head_dim = Sides { keys: key_dim, values: value_dim };
                let config: KvCacheConfig = name.parse().unwrap();
                let shape = CacheShape::new(1, 2, head_dim);
                let Ok(layout) = CacheLayout::new(&config, shape) else { continue };
                for (rows, plane) in (1..=9).flat_map(|rows| [1, 8, 32, 64].map(|p| (rows, p))) {
                    let float = ElemType::Float(FloatKind::F32);
                    let problem = DecodeProblem {
                        layout,
                        len: 99,
                        tokens: 99,
                        rows,
                        float,
                        query: float,
                        scores: Scores::PLAIN,
                    };
                    let hardware = Hardware { n_multiprocessors: 4, plane };
                    let (bp, settings) = prepare(&problem, hardware).unwrap();
                    assert!(bp.units <= 256 && bp.shared_bytes() <= 16 * 1024, "{bp:?}");
                    assert!(bp.units.is_multiple_of(plane) && plane.is_multiple_of(bp.lanes));
                    assert!((key_dim / bp.vector).is_multiple_of(bp.lanes), "{bp:?}");
                    assert!(value_dim.is_multiple_of(bp.unit_channels) && bp.strides() > 0);
                    let packed_values = bp.specs.values.is_some();
                    assert!(bp.unit_channels.is_multiple_of(bp.vector) || packed_values);
                    match bp.specs.keys {
                        Some(spec) if spec.granularity == Granularity::PerChannel => {
                            assert!(bp.unit_tokens.is_multiple_of(spec.codes_per_word()), "{bp:?}");
                            assert!(spec.group_size.is_multiple_of(bp.unit_tokens), "{bp:?}");
                        }
                        Some(spec) => {
                            let vectors = key_dim / spec.codes_per_word() / bp.vector;
                            assert!(vectors > 0 && vectors.is_multiple_of(bp.lanes), "{bp:?}");
                        }
                        None => {}
                    }
                    if let Some(spec) = bp.specs.values {
                        assert!(bp.unit_channels.is_multiple_of(spec.codes_per_word()), "{bp:?}");
                        assert!(spec.group_size.is_multiple_of(bp.unit_channels), "{bp:?}");
                    }
                    assert!(settings.row_chunks * bp.rows >= rows);
                }
            }
        }
    }

    #[test]
    fn long_contexts_are_split_over_the_device() {
        let config: KvCacheConfig = "k2v2".parse().unwrap();
        let shape = CacheShape::new(1, 4, 64);
        let layout = CacheLayout::new(&config, shape).unwrap();
        let float = ElemType::Float(FloatKind::F32);
        let hardware = Hardware { n_multiprocessors: 16, plane: 1 };
        let n_splits = |tokens| {
            let problem = DecodeProblem {
                layout,
                len: tokens,
                tokens,
                rows: 3,
                float,
                query: float,
                scores: Scores::PLAIN,
            };
            prepare(&problem, hardware).unwrap().1.n_splits
        };
        assert_eq!(n_splits(1), 1);
        // As many units as run at once on 16 multiprocessors, for 4 slices, in cubes of 64.
        assert_eq!(n_splits(1 << 20), UNITS_PER_MULTIPROCESSOR * 16 / 64 / 4);
    }
}
