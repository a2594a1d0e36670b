use cubecl::ir::{ElemType, FloatKind};

use crate::{Error, Result, layout::CacheLayout};

/// Largest head_dim of the attention kernels.
const MAX_HEAD_DIM: usize = 256;

/// Shared memory that WebGPU guarantees, in bytes.
const SHARED_BYTES: usize = 16 * 1024;

/// Cubes per streaming multiprocessor that hide memory latency; a guess until measured on hardware.
const CUBES_PER_MULTIPROCESSOR: usize = 4;

/// Fewest tiles of tokens worth a cube of their own.
const MIN_TILES_PER_SPLIT: usize = 2;

/// Attention of `rows` query rows per (batch, kv head) over the first `tokens` tokens of a cache.
#[derive(Clone, Copy, Debug)]
pub struct DecodeProblem {
    /// The cache.
    pub layout: CacheLayout,
    /// Tokens in the cache.
    pub len: usize,
    /// Tokens to attend to, at most `len`.
    pub tokens: usize,
    /// Query rows per (batch, kv head): query heads per kv head times query tokens.
    pub rows: usize,
    /// Type of the float rows.
    pub float: ElemType,
}

/// What changes the generated code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeBlueprint {
    /// Channels.
    pub head_dim: usize,
    /// Query rows per cube.
    pub rows: usize,
    /// Bits of packed keys, 0 if keys are in float.
    pub key_bits: u32,
    /// Bits of packed values, 0 if values are in float.
    pub value_bits: u32,
    /// Elements per group.
    pub group_size: usize,
    /// Tokens per tile: one group of keys.
    pub tile: usize,
    /// Units per cube.
    pub units: usize,
}

/// How the work is cut; run-time numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) row_chunks: usize,
    pub(super) sink_tiles: usize,
    pub(super) n_tiles: usize,
    pub(super) n_splits: usize,
    pub(super) tiles_per_split: usize,
}

impl DecodeBlueprint {
    /// Values that share a parameter word, or 0.
    pub(super) fn value_groups(&self) -> usize {
        if self.value_bits == 0 { 0 } else { self.head_dim / self.group_size }
    }

    fn shared_bytes(&self) -> usize {
        let per_row = 2 * self.head_dim + self.tile + 4;
        4 * (self.rows * per_row + 2 * self.tile * self.value_groups().max(1))
    }
}

/// Plans a launch.
pub(super) fn prepare(
    problem: &DecodeProblem,
    n_multiprocessors: usize,
) -> Result<(DecodeBlueprint, Settings)> {
    let layout = &problem.layout;
    let (config, head_dim) = (layout.config(), layout.shape().head_dim);
    let unsupported = |why: String| Error::Unsupported {
        what: format!("decode_attention of cache {config} at head_dim {head_dim}"),
        why,
    };
    if head_dim > MAX_HEAD_DIM {
        return Err(unsupported(format!("head_dim is above {MAX_HEAD_DIM}")));
    }
    let bits = |spec: Option<crate::layout::QuantSpec>| spec.map_or(0, |spec| spec.n_bits);
    let (key_bits, value_bits) = (bits(layout.key_spec()), bits(layout.value_spec()));
    let tile = if key_bits > 0 { config.group_size } else { 32 };
    let mut blueprint = DecodeBlueprint {
        head_dim,
        rows: problem.rows.min(8),
        key_bits,
        value_bits,
        group_size: config.group_size,
        tile,
        units: if head_dim <= 64 { 64 } else { 128 },
    };
    while blueprint.shared_bytes() > SHARED_BYTES && blueprint.rows > 1 {
        blueprint.rows = blueprint.rows.div_ceil(2);
    }
    if blueprint.shared_bytes() > SHARED_BYTES {
        let (bytes, group) = (blueprint.shared_bytes(), config.group_size);
        return Err(unsupported(format!(
            "group_size {group} needs {bytes} bytes of shared memory, above {SHARED_BYTES}"
        )));
    }
    let sinks = config.sink_tokens.min(problem.tokens);
    let sink_tiles = sinks.div_ceil(tile);
    let n_tiles = sink_tiles + (problem.tokens - sinks).div_ceil(tile);
    let row_chunks = problem.rows.div_ceil(blueprint.rows);
    let wanted = CUBES_PER_MULTIPROCESSOR * n_multiprocessors;
    let n_splits =
        wanted.div_ceil(layout.slices() * row_chunks).min(n_tiles / MIN_TILES_PER_SPLIT).max(1);
    let tiles_per_split = n_tiles.div_ceil(n_splits);
    let n_splits = n_tiles.div_ceil(tiles_per_split);
    Ok((blueprint, Settings { row_chunks, sink_tiles, n_tiles, n_splits, tiles_per_split }))
}

/// Whether a cache of this layout can be attended to on any device.
pub(crate) fn check(layout: &CacheLayout) -> Result<()> {
    let float = ElemType::Float(FloatKind::F32);
    let problem = DecodeProblem { layout: *layout, len: 1, tokens: 1, rows: 1, float };
    prepare(&problem, 1).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheShape, KvCacheConfig};

    #[test]
    fn layouts_that_do_not_fit_are_errors() {
        let layout = |name: &str, head_dim| {
            let shape = CacheShape { batch: 1, n_kv_heads: 1, head_dim };
            CacheLayout::new(&name.parse().unwrap(), shape).unwrap()
        };
        assert!(check(&layout("k2v2", 256)).is_ok());
        for (name, head_dim, part) in
            [("k2v2", 288, "head_dim is above 256"), ("k2v16-g4096-r4096", 64, "shared memory")]
        {
            let message = check(&layout(name, head_dim)).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn splits_cover_every_tile_once() {
        for tokens in [1, 31, 32, 33, 500, 4096] {
            for sinks in [0, 4, 40] {
                let config: KvCacheConfig = format!("k2v2-s{sinks}").parse().unwrap();
                let shape = CacheShape { batch: 1, n_kv_heads: 3, head_dim: 64 };
                let layout = CacheLayout::new(&config, shape).unwrap();
                let float = ElemType::Float(FloatKind::F32);
                let problem = DecodeProblem { layout, len: tokens, tokens, rows: 3, float };
                let (_, settings) = prepare(&problem, 16).unwrap();
                assert!(settings.n_splits * settings.tiles_per_split >= settings.n_tiles);
                assert!((settings.n_splits - 1) * settings.tiles_per_split < settings.n_tiles);
            }
        }
    }
}
