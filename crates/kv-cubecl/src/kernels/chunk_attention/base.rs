use cubecl::ir::DeviceProperties;

use crate::{
    kernels::{
        decode_attention::{DecodeProblem, Hardware, splits},
        row_blocks::{Processor, RowBlocks},
    },
    layout::{Granularity, QuantSpec, Sides},
};

/// Fewest query rows per kv head for which a cube has enough to do.
const MIN_ROWS: usize = 8;

/// Cubes that a streaming multiprocessor runs at once, estimated from 255 registers per unit, not
/// measured.
const CUBES_PER_MULTIPROCESSOR: usize = 8;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChunkBlueprint {
    /// Rows, units and their runs of tokens and channels.
    pub(crate) blocks: RowBlocks,
    /// Quantization of keys and values, if any.
    pub(crate) specs: Sides<Option<QuantSpec>>,
    /// See [`Grid::flat`](crate::kernels::Grid::flat).
    pub(crate) flat: bool,
    /// True if scores have a soft cap.
    pub(crate) softcap: bool,
}

impl ChunkBlueprint {
    /// Returns whether some keys or values are packed, so that tokens have two forms.
    pub(super) const fn packed(&self) -> bool {
        self.specs.keys.is_some() || self.specs.values.is_some()
    }
}

/// The properties of a device that a plan depends on.
#[derive(Clone, Copy, Debug)]
struct Machine {
    n_multiprocessors: usize,
    processor: Processor,
}

/// Division of a launch's work over cubes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkPlan {
    pub(super) blueprint: ChunkBlueprint,
    pub(super) row_chunks: usize,
    /// Number of oldest tokens after the sinks that are packed on each quantized side; all tokens
    /// if no side is quantized.
    pub(super) main: usize,
    pub(super) main_tiles: usize,
    pub(super) sink_tiles: usize,
    pub(super) n_tiles: usize,
    pub(super) n_splits: usize,
    pub(super) tiles_per_split: usize,
}

/// Plans a launch; `None` for problems left to
/// [`decode_attention`](crate::kernels::decode_attention).
pub(crate) fn plan(problem: &DecodeProblem, properties: &DeviceProperties) -> Option<ChunkPlan> {
    let machine = Machine {
        n_multiprocessors: Hardware::of(properties).n_multiprocessors,
        processor: Processor::of(properties),
    };
    prepare(problem, machine)
}

fn prepare(problem: &DecodeProblem, machine: Machine) -> Option<ChunkPlan> {
    let layout = &problem.layout;
    let config = layout.config();
    // All tokens that are asked for must be seen.
    let schedule = layout.schedule();
    if problem.rows < MIN_ROWS || schedule.begin(problem.tokens) > schedule.sink_tokens {
        return None;
    }
    let specs = layout.specs();
    let grouped = |spec: Option<QuantSpec>, axis| {
        spec.filter(|spec| spec.granularity == axis).map_or(0, |spec| spec.group_size)
    };
    let token_group = grouped(specs.keys, Granularity::PerChannel);
    let channel_group = grouped(specs.values, Granularity::PerToken);
    // Vectors of words are read of keys that are packed one by one.
    let key_words = specs.keys.filter(|spec| spec.granularity == Granularity::PerToken);
    let key_dim = layout.shape().head_dim.keys;
    if key_words.is_some_and(|spec| !key_dim.is_multiple_of(4 * spec.codes_per_word())) {
        return None;
    }
    let blocks =
        RowBlocks::new(layout.shape().head_dim, token_group, channel_group, machine.processor)?;
    let softcap = problem.scores.softcap.is_some();
    let blueprint = ChunkBlueprint { blocks, specs, flat: false, softcap };
    // Most tokens are old: packed on each side that is quantized. Their number is rounded down to
    // whole runs, since runs of packed keys must start at multiples of their length.
    let sinks = if blueprint.packed() { config.sink_tokens.min(problem.tokens) } else { 0 };
    let counts = layout.schedule().counts(problem.len);
    let mut main = problem.tokens - sinks;
    if specs.keys.is_some() {
        main = main.min(counts.keys);
    }
    if specs.values.is_some() {
        main = main.min(counts.values);
    }
    if blueprint.packed() {
        main = main / blocks.unit_tokens * blocks.unit_tokens;
    }
    let tokens = [sinks, main, problem.tokens - sinks - main];
    let [sink_tiles, main_tiles, other_tiles] = tokens.map(|n| n.div_ceil(blocks.tile()));
    let n_tiles = sink_tiles + main_tiles + other_tiles;
    let row_chunks = problem.rows.div_ceil(blocks.rows);
    let wanted =
        CUBES_PER_MULTIPROCESSOR * machine.n_multiprocessors / (layout.slices() * row_chunks);
    let (n_splits, tiles_per_split) = splits(n_tiles, wanted.max(1));
    Some(ChunkPlan {
        blueprint,
        row_chunks,
        main,
        main_tiles,
        sink_tiles,
        n_tiles,
        n_splits,
        tiles_per_split,
    })
}

#[cfg(test)]
mod tests {
    use cubecl::ir::{ElemType, FloatKind};

    use super::*;
    use crate::{
        CacheShape, KvCacheConfig, kernels::row_blocks::VECTOR, layout::CacheLayout, scores::Scores,
    };

    fn problem(
        name: &str,
        head_dim: impl Into<Sides<usize>>,
        tokens: usize,
        rows: usize,
    ) -> Option<DecodeProblem> {
        let config: KvCacheConfig = name.parse().unwrap();
        let shape = CacheShape::new(1, 2, head_dim);
        let layout = CacheLayout::new(&config, shape).ok()?;
        let float = ElemType::Float(FloatKind::F32);
        Some(DecodeProblem {
            layout,
            len: tokens,
            tokens,
            rows,
            float,
            query: float,
            scores: Scores::PLAIN,
        })
    }

    fn machines() -> [Machine; 2] {
        [(Processor::Gpu, 132), (Processor::Software, 16)]
            .map(|(processor, n_multiprocessors)| Machine { n_multiprocessors, processor })
    }

    /// Every plan is within WebGPU's limits; its runs divide code words or consist of whole ones,
    /// and they divide groups.
    #[test]
    fn plans_fit_and_their_parts_divide() {
        let names = [
            "float",
            "k8v8-g4-r4",
            "k8v8",
            "k4v4-g8-r8",
            "k4v2",
            "k2v4-g48-r48",
            "k2v16",
            "k16vint8",
        ];
        let alike = [16, 20, 32, 40, 64, 80, 96, 100, 128, 160, 192, 240, 252, 256];
        let unlike = [(192, 128), (20, 256), (256, 32), (64, 80)];
        let unlike = unlike.map(|(keys, values)| Sides { keys, values });
        let head_dims: Vec<_> = alike.map(Sides::from).into_iter().chain(unlike).collect();
        for (name, head_dim) in
            names.into_iter().flat_map(|name| head_dims.iter().map(move |&d| (name, d)))
        {
            let Some(problem) = problem(name, head_dim, 99, 65) else { continue };
            for machine in machines() {
                let ChunkPlan { blueprint, row_chunks, .. } = prepare(&problem, machine).unwrap();
                let bp = blueprint.blocks;
                assert!(bp.units <= 256 && bp.shared_bytes() <= 16 * 1024, "{bp:?}");
                assert!(row_chunks * bp.rows >= problem.rows, "{bp:?}");
                assert!((row_chunks - 1) * bp.rows < problem.rows, "{bp:?}");
                assert!(
                    head_dim.values.is_multiple_of(bp.unit_channels) && bp.strides() > 0,
                    "{bp:?}"
                );
                let fits = |spec: Option<QuantSpec>, n: usize| {
                    spec.is_none_or(|spec| {
                        let codes = spec.codes_per_word();
                        let words = n.is_multiple_of(codes) || codes.is_multiple_of(n);
                        words && spec.group_size.is_multiple_of(n)
                    })
                };
                assert!(bp.unit_tokens.is_multiple_of(VECTOR), "{bp:?}");
                assert!(bp.unit_channels.is_multiple_of(VECTOR), "{bp:?}");
                assert!(fits(blueprint.specs.keys, bp.unit_tokens), "{bp:?}");
                assert!(fits(blueprint.specs.values, bp.unit_channels), "{bp:?}");
            }
        }
    }

    #[test]
    fn splits_cover_every_token_once() {
        for tokens in [1, 31, 32, 33, 129, 500, 4096] {
            for name in ["float", "k2v2", "k4v2-s4", "k16v8-s40", "k8v16-s200"] {
                let problem = problem(name, 64, tokens, 48).unwrap();
                for machine in machines() {
                    let plan = prepare(&problem, machine).unwrap();
                    let sinks = match name {
                        "float" => 0,
                        _ => problem.layout.config().sink_tokens.min(tokens),
                    };
                    let parts = [sinks, plan.main, tokens - sinks - plan.main];
                    let tiles = parts.map(|n| n.div_ceil(plan.blueprint.blocks.tile()));
                    assert_eq!(tiles[..2], [plan.sink_tiles, plan.main_tiles]);
                    assert_eq!(tiles.iter().sum::<usize>(), plan.n_tiles);
                    assert!(plan.n_splits * plan.tiles_per_split >= plan.n_tiles);
                    assert!((plan.n_splits - 1) * plan.tiles_per_split < plan.n_tiles);
                }
            }
        }
    }

    #[test]
    fn the_rest_is_left_to_decode_attention() {
        let machine = machines()[0];
        let plan = |name, head_dim, rows| {
            prepare(&problem(name, head_dim, 99, rows).unwrap(), machine).is_some()
        };
        assert!(plan("k2v2", 64, MIN_ROWS) && !plan("k2v2", 64, MIN_ROWS - 1));
        assert!(plan("k2v16", 68, 64) && !plan("k2v16", 66, 64));
    }
}
