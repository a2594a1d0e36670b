//! What a player sees.

use crate::{Maze, Player};

/// A picture of [`SIZE`](Self::SIZE) rows and columns of red, green and blue.
#[derive(Clone, PartialEq, Eq)]
pub struct Frame {
    rgb: Vec<u8>,
}

impl core::fmt::Debug for Frame {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Frame").field("first", &&self.rgb[..3]).finish_non_exhaustive()
    }
}

/// Rays for a column of pixels, whose colors are averaged.
const RAYS: usize = 3;
/// Sideways reach of the view per unit ahead: a view of 80 degrees.
const HALF_VIEW: f64 = 0.839_099_631;
/// The start of the darker part of a wall, from its middle at 0 to the floor at 1.
const SKIRTING: f64 = 0.7;

/// Red, green and blue, from 0 to 255.
type Rgb = [f64; 3];

/// Colors of walls: of all hues, light and dark.
const WALLS: [Rgb; Maze::COLORS] = [
    [230.0, 60.0, 60.0],
    [240.0, 150.0, 40.0],
    [235.0, 225.0, 60.0],
    [130.0, 210.0, 50.0],
    [40.0, 150.0, 70.0],
    [50.0, 200.0, 180.0],
    [60.0, 130.0, 240.0],
    [50.0, 60.0, 170.0],
    [140.0, 70.0, 210.0],
    [230.0, 90.0, 200.0],
    [240.0, 240.0, 240.0],
    [140.0, 90.0, 50.0],
];
/// Above, and at the horizon.
const SKY: [Rgb; 2] = [[70.0, 110.0, 190.0], [180.0, 205.0, 235.0]];
/// At the horizon, and below.
const FLOOR: [Rgb; 2] = [[130.0, 125.0, 115.0], [60.0, 55.0, 50.0]];

/// The wall that a ray hits.
struct Hit {
    /// Distance along the direction of view.
    distance: f64,
    color: Rgb,
}

fn scaled(color: Rgb, by: f64) -> Rgb {
    color.map(|x| x * by)
}

fn mixed([a, b]: [Rgb; 2], t: f64) -> Rgb {
    core::array::from_fn(|i| a[i] + (b[i] - a[i]) * t)
}

impl Frame {
    /// Pixels along a side.
    pub const SIZE: usize = 48;

    /// Renders the view of a player.
    ///
    /// Each ray visits the blocks on its way in turn (Amanatides and Woo, 1987). The share of wall
    /// in a pixel is computed from the ends of walls, so edges move smoothly.
    pub fn render(maze: &Maze, player: &Player) -> Self {
        let size = Self::SIZE;
        let [ahead_x, ahead_y] = Player::direction(player.heading);
        // Half the height of a wall in pixels, a block away.
        let height = size as f64 / 2.0 / HALF_VIEW / 2.0;
        let mut pixels = vec![[0.0; 3]; size * size];
        for ray in 0..size * RAYS {
            let aside = ((ray as f64 + 0.5) / (size * RAYS) as f64 * 2.0 - 1.0) * HALF_VIEW;
            let direction = [ahead_x - aside * ahead_y, ahead_y + aside * ahead_x];
            let hit = cast(maze, [player.x, player.y], direction);
            let half = height / hit.distance;
            for row in 0..size {
                let pixel = &mut pixels[row * size + ray / RAYS];
                let color = row_color(row, half, hit.color);
                (0..3).for_each(|i| pixel[i] += color[i] / RAYS as f64);
            }
        }
        let rgb = pixels.iter().flatten().map(|x| x.round().clamp(0.0, 255.0) as u8).collect();
        Self { rgb }
    }

    /// A picture of these bytes, red, green and blue of each pixel, by rows.
    ///
    /// # Panics
    /// When they are not `3 * SIZE * SIZE`.
    pub fn from_rgb(rgb: Vec<u8>) -> Self {
        assert_eq!(rgb.len(), 3 * Self::SIZE * Self::SIZE, "bytes of a frame");
        Self { rgb }
    }

    /// Red, green and blue of each pixel, by rows.
    pub fn rgb(&self) -> &[u8] {
        &self.rgb
    }
}

/// Returns a pixel of a column whose wall takes `half` pixels above and below the horizon.
fn row_color(row: usize, half: f64, wall: Rgb) -> Rgb {
    let middle = Frame::SIZE as f64 / 2.0;
    let (top, bottom) = (row as f64 - middle, row as f64 + 1.0 - middle);
    // How much of the pixel lies between two heights.
    let part = |from: f64, to: f64| (bottom.min(to) - top.max(from)).max(0.0);
    let out = ((top + 0.5).abs() / middle).min(1.0);
    let parts = [
        (part(f64::NEG_INFINITY, -half), mixed(SKY, 1.0 - out)),
        (part(-half, SKIRTING * half), wall),
        (part(SKIRTING * half, half), scaled(wall, 0.6)),
        (part(half, f64::INFINITY), mixed(FLOOR, out)),
    ];
    parts
        .iter()
        .fold([0.0; 3], |sum, (part, color)| core::array::from_fn(|i| sum[i] + part * color[i]))
}

/// Finds the wall that a ray hits first.
fn cast(maze: &Maze, from: [f64; 2], direction: [f64; 2]) -> Hit {
    let mut block = from.map(|at| at as usize);
    // Along each axis, how far the ray goes from one side of a block to the next, and to the first.
    let step = direction.map(|d| 1.0 / d.abs().max(1e-12));
    let mut next: [f64; 2] = core::array::from_fn(|i| {
        let within = from[i] - block[i] as f64;
        step[i] * if direction[i] > 0.0 { 1.0 - within } else { within }
    });
    loop {
        let axis = usize::from(next[1] < next[0]);
        let distance = next[axis];
        next[axis] += step[axis];
        block[axis] = match direction[axis] > 0.0 {
            true => block[axis] + 1,
            false => block[axis].wrapping_sub(1),
        };
        if let Some(color) = maze.color(block[0], block[1]) {
            let along = from[1 - axis] + distance * direction[1 - axis];
            let along = along - along.floor();
            // Each side of a block has a brightness of its own, which grows from one edge to the
            // other; edges are dark.
            let side = 1.0 - 0.12 * (2 * axis + usize::from(direction[axis] > 0.0)) as f64;
            let edge = if (along - 0.5).abs() > 0.46 { 0.6 } else { 1.0 };
            let shade = side * edge * (0.7 + 0.3 * along) / (1.0 + 0.12 * distance);
            return Hit { distance: distance.max(1e-3), color: scaled(WALLS[color], shade) };
        }
    }
}
