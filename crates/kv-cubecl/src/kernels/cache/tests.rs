use cubecl::prelude::*;

use super::{
    blocks::{
        BlockArgsCompilationArg, gather_blocks::GatherBlocks, gradient_groups::GradientGroups,
        normalize_blocks::NormalizeBlocks, restore_groups::RestoreGroups,
        store_groups::StoreGroups,
    },
    elements::{BlockBlueprint, ChunkCompilationArg, FlushBlueprint, TILE_UNITS, append::Append},
    flush::flush::Flush,
    launch::F32,
    token::{SideBlueprint, TokenArgsCompilationArg, write_token::WriteToken},
};
use crate::{
    CacheShape,
    kernels::{
        ELEMENTWISE_UNITS,
        cuda_source::{buffer, each_ptx, named, settings},
        layout::PositionsCompilationArg,
        rope::RopeCompilationArg,
    },
    layout::{CacheLayout, Side},
};

/// Two bits in groups of 32, the narrowest codes and the most of them per word, and formats that
/// quantize tokens by themselves, whose parameters share words.
const CACHES: [&str; 6] = ["k2v2", "k3v3", "ktq2vtq4", "kint8vint8", "ke4m3ve5m2", "kmxfp4ve4m3b"];

/// Caches whose blocks are gathered before they are quantized.
const GATHERED: [&str; 3] = ["kvn2vvn3", "k2v2-c195", "k3v3-clip"];

fn chunk<C: Float>() -> ChunkCompilationArg<C> {
    let rope =
        RopeCompilationArg { table: ComptimeOptionCompilationArg::None, positions: (), half: () };
    ChunkCompilationArg { rows: buffer(), rope }
}

fn positions() -> PositionsCompilationArg {
    PositionsCompilationArg { newest: ComptimeOptionCompilationArg::None, slices: () }
}

#[test]
fn no_array_is_in_local_memory() {
    let s = || settings(ELEMENTWISE_UNITS, ExecutionMode::Checked);
    let (b, t) = (buffer, Default::default);
    // Scalars have no compilation arguments, and the structs of them are of size zero.
    each_ptx(|card| {
        let d = || card.clone();
        let args = || ().dynamic_cast();
        let mut kernels = Vec::new();
        for cache in CACHES {
            let shape = CacheShape::new(1, 8, 128);
            let layout = CacheLayout::new(&cache.parse().unwrap(), shape).unwrap();
            let specs = layout.sides().map(|side| side.spec);
            let token = TokenArgsCompilationArg {
                lengths: ().dynamic_cast(),
                positions: positions(),
                cache: ().dynamic_cast(),
                keys: ().dynamic_cast(),
                values: ().dynamic_cast(),
                n_keys: (),
                n: (),
            };
            let bp = specs.map(|spec| SideBlueprint { spec, saturating: false });
            let write_token = WriteToken::new(
                s(),
                d(),
                t(),
                chunk(),
                chunk(),
                b(),
                b(),
                b(),
                token,
                bp,
                F32,
                F32,
            );
            kernels.push(named(format!("write-token-{cache}"), write_token));
            for side in Side::BOTH {
                let sides = ().dynamic_cast();
                let runs = ().dynamic_cast();
                let bp = FlushBlueprint { spec: specs[side].unwrap(), saturating: false };
                let flush =
                    Flush::new(s(), d(), t(), b(), chunk(), b(), args(), sides, (), runs, bp, F32);
                kernels.push(named(format!("flush-{side}-{cache}"), flush));
            }
        }
        let side = ().dynamic_cast();
        let append = Append::new(s(), d(), t(), chunk(), b(), args(), side, (), (), false, F32);
        kernels.push(named("append-float", append));
        kernels
    });
}

#[test]
fn no_array_of_gathered_blocks_is_in_local_memory() {
    let s = |units| settings(units, ExecutionMode::Checked);
    let (b, t) = (buffer, Default::default);
    each_ptx(|card| {
        let d = || card.clone();
        let args = || BlockArgsCompilationArg {
            lengths: ().dynamic_cast(),
            positions: positions(),
            schedule: ().dynamic_cast(),
            capacity: (),
            first: (),
            blocks: (),
        };
        let mut kernels = Vec::new();
        for cache in GATHERED {
            let shape = CacheShape::new(1, 8, 128);
            let layout = CacheLayout::new(&cache.parse().unwrap(), shape).unwrap();
            for side in Side::BOTH {
                let spec = layout.sides()[side].spec.unwrap();
                let values = side == Side::Values;
                let bp = BlockBlueprint { spec, head_dim: 128, values, saturating: false };
                let place = || ().dynamic_cast();
                let units = s(ELEMENTWISE_UNITS);
                let name = |kernel: &str| format!("{kernel}-{side}-{cache}");
                let gather = GatherBlocks::new(
                    units.clone(),
                    d(),
                    t(),
                    b(),
                    chunk(),
                    b(),
                    args(),
                    place(),
                    (),
                    bp,
                    F32,
                    F32,
                );
                kernels.push(named(name("gather"), gather));
                if spec.tile.is_some() {
                    let normalize =
                        NormalizeBlocks::new(s(TILE_UNITS), d(), t(), b(), b(), args(), (), bp);
                    kernels.push(named(name("normalize"), normalize));
                }
                let store = StoreGroups::new(
                    units.clone(),
                    d(),
                    t(),
                    b(),
                    b(),
                    b(),
                    args(),
                    place(),
                    (),
                    bp,
                );
                kernels.push(named(name("store"), store));
                let restore =
                    RestoreGroups::new(units.clone(), d(), t(), b(), b(), b(), args(), (), (), bp);
                kernels.push(named(name("restore"), restore));
                let gradient =
                    GradientGroups::new(units, d(), t(), b(), b(), b(), args(), (), (), bp);
                kernels.push(named(name("gradient"), gradient));
            }
        }
        kernels
    });
}
