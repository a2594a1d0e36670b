//! The tile registers of the processor.

use core::{arch::asm, marker::PhantomData};

/// Rows of a tile: keys or heads.
pub(super) const TILE_ROWS: usize = 16;

/// Channels of a tile.
pub(super) const TILE_CHANNELS: usize = 32;

/// Tiles of heads whose sums are in registers together.
pub(super) const HEAD_TILES: usize = 4;

/// Heads whose sums are in registers together.
pub(super) const HEADS: usize = HEAD_TILES * TILE_ROWS;

/// A row of a tile. It is a line of the cache, so that it takes one access.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Row(pub(super) [u16; TILE_CHANNELS]);

/// The sums of a key with 16 heads.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Sums(pub(super) [f32; TILE_ROWS]);

pub(super) const EMPTY: Row = Row([0; TILE_CHANNELS]);

/// The tile registers of this thread's processor: sums of 16 keys with [`HEADS`] heads in registers
/// 0 to 3, factors in the others. They are released when this is dropped.
///
/// Sums outlive the assembly that wrote them, which Rust does not know of. The compiler itself uses
/// no tiles, but a function of another language may, so none must be called while sums are live.
pub(super) struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// # Safety
    /// The processor must have tiles, and this process the permission to use them. The thread must
    /// not have other `Tiles`.
    pub(super) unsafe fn new() -> Self {
        let mut config = Row([0; TILE_CHANNELS]);
        // Palette 1 has 8 tiles. Their widths in bytes are u16 from byte 16 on, and their heights
        // are bytes from 48 on.
        config.0[0] = 1;
        config.0[8..16].fill(size_of::<Row>() as u16);
        config.0[24..28].fill(u16::from_le_bytes([TILE_ROWS as u8; 2]));
        // SAFETY: the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Self(PhantomData)
    }

    /// Sets all sums to 0.
    #[inline(always)]
    pub(super) fn clear(&self) {
        // SAFETY: the tiles are configured.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nomem, nostack)
            );
        }
    }

    /// Adds the products of 32 channels of 16 keys, in every `stride`-th row, with [`HEADS`] heads.
    #[inline(always)]
    pub(super) fn multiply(&self, keys: &[Row], stride: usize, queries: &[Row]) {
        assert!(keys.len() > (TILE_ROWS - 1) * stride && queries.len() == HEADS);
        // SAFETY: the tiles are configured, and those that are read are in the slices.
        unsafe {
            asm!(
                "tileloadd tmm4, [{keys} + {stride}]",
                "tileloadd tmm5, [{queries} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{queries} + {row} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "tileloadd tmm7, [{queries} + {row} + 2048]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tileloadd tmm5, [{queries} + {row} + 3072]",
                "tdpbf16ps tmm3, tmm4, tmm5",
                keys = in(reg) keys.as_ptr(),
                stride = in(reg) stride * size_of::<Row>(),
                queries = in(reg) queries.as_ptr(),
                row = in(reg) size_of::<Row>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(readonly, nostack),
            );
        }
    }

    /// Overwrites four of every `stride` elements, 16 times, with the sums of a key.
    #[inline(always)]
    pub(super) fn store(&self, sums: &mut [Sums], stride: usize) {
        assert!(sums.len() >= (TILE_ROWS - 1) * stride + HEAD_TILES);
        // SAFETY: the tiles are configured, and those that are written are in the slice.
        unsafe {
            asm!(
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 64], tmm1",
                "tilestored [{sums} + {stride} + 128], tmm2",
                "tilestored [{sums} + {stride} + 192], tmm3",
                sums = in(reg) sums.as_mut_ptr(),
                stride = in(reg) stride * size_of::<Sums>(),
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: nothing reads the tiles afterwards.
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
    }
}
