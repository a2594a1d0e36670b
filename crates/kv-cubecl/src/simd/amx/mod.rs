//! AMX, instructions that multiply tiles of 16 rows of 32 numbers in bf16 and sum in f32.

mod product;
mod tiles;

use core::arch::x86_64::__cpuid_count;
use std::sync::LazyLock;

pub(crate) use product::{Digits, Products};
pub(crate) use tiles::{COLUMN_TILES, COLUMNS, DEPTH, EMPTY, ROWS, Row, Sums, Tiles};

/// Returns whether this processor has AMX and the AVX-512 instructions that arrange its tiles, and
/// Linux lets this process use them.
///
/// The first call asks for that, which has a side effect: from then on, Linux refuses stacks for
/// signal handlers (`sigaltstack`) that are too small for the tiles, 8 KiB.
pub(crate) fn available() -> bool {
    static AVAILABLE: LazyLock<bool> = LazyLock::new(|| {
        let has_vectors = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512bf16");
        has_vectors && has_tiles() && permitted()
    });
    *AVAILABLE
}

/// Returns whether the processor, which has AVX-512, has tiles and their products of bf16.
fn has_tiles() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

/// Asks Linux to save the tiles of this process' threads, which it does on request only
/// (Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes numbers, and touches no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}
