//! The tile registers of the processor.

use core::{arch::asm, marker::PhantomData};

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;

/// Numbers of a row of factors, over which products are summed.
pub(crate) const DEPTH: usize = 32;

/// Tiles of right factors whose sums are in registers together.
pub(crate) const COLUMN_TILES: usize = 4;

/// Columns whose sums are in registers together.
pub(crate) const COLUMNS: usize = COLUMN_TILES * ROWS;

/// A row of a tile in bf16. It is a line of the cache, so that it takes one access.
///
/// The left factors have a row of the matrix in it. The right factors have two rows of 16 columns,
/// with the two numbers of a column beside each other.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Row(pub(crate) [u16; DEPTH]);

/// The sums of a row with 16 columns.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Sums(pub(crate) [f32; ROWS]);

pub(crate) const EMPTY: Row = Row([0; DEPTH]);

/// The tile registers of this thread's processor: sums of 16 rows with [`COLUMNS`] columns in
/// registers 0 to 3, factors in the others. They are released when this is dropped.
///
/// Sums outlive the assembly that wrote them, which Rust does not know of. The compiler itself uses
/// no tiles, but a function of another language may, so none must be called while sums are live.
pub(crate) struct Tiles(PhantomData<*const ()>);

impl Tiles {
    /// # Safety
    /// The processor must have tiles, and this process the permission to use them. The thread must
    /// not have other `Tiles`.
    pub(crate) unsafe fn new() -> Self {
        let mut config = EMPTY;
        // Palette 1 has 8 tiles. Their widths in bytes are u16 from byte 16 on, and their heights
        // are bytes from 48 on.
        config.0[0] = 1;
        config.0[8..16].fill(size_of::<Row>() as u16);
        config.0[24..28].fill(u16::from_le_bytes([ROWS as u8; 2]));
        // SAFETY: the configuration is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        Self(PhantomData)
    }

    /// Sets all sums to 0.
    #[inline(always)]
    pub(crate) fn clear(&self) {
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

    /// Adds the products of 16 rows, every `stride`-th of `left`, with the [`COLUMNS`] columns of
    /// `right`.
    #[inline(always)]
    pub(crate) fn multiply(&self, left: &[Row], stride: usize, right: &[Row]) {
        assert!(left.len() > (ROWS - 1) * stride && right.len() == COLUMNS);
        // SAFETY: the tiles are configured, and those that are read are in the slices.
        unsafe {
            asm!(
                "tileloadd tmm4, [{left} + {stride}]",
                "tileloadd tmm5, [{right} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{right} + {row} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {row} + 2048]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tileloadd tmm5, [{right} + {row} + 3072]",
                "tdpbf16ps tmm3, tmm4, tmm5",
                left = in(reg) left.as_ptr(),
                stride = in(reg) stride * size_of::<Row>(),
                right = in(reg) right.as_ptr(),
                row = in(reg) size_of::<Row>(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(readonly, nostack),
            );
        }
    }

    /// Overwrites [`COLUMNS`] of every `stride` numbers, 16 times, with the sums of a row.
    #[inline(always)]
    pub(crate) fn store(&self, sums: &mut [f32], stride: usize) {
        assert!(sums.len() >= (ROWS - 1) * stride + COLUMNS);
        // SAFETY: the tiles are configured, and those that are written are in the slice.
        unsafe {
            asm!(
                "tilestored [{sums} + {stride}], tmm0",
                "tilestored [{sums} + {stride} + 64], tmm1",
                "tilestored [{sums} + {stride} + 128], tmm2",
                "tilestored [{sums} + {stride} + 192], tmm3",
                sums = in(reg) sums.as_mut_ptr(),
                stride = in(reg) stride * size_of::<f32>(),
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
