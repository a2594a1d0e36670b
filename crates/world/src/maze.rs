//! Walls and where they are.

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

/// A square maze of blocks: free or a wall of one color. Rooms lie at odd coordinates with passages
/// between them, and every room can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maze {
    /// 0 where one can walk, else one more than the color of the wall; by rows.
    blocks: Vec<u8>,
}

/// Rooms along a side.
const ROOMS: usize = 3;

impl Maze {
    /// Blocks along a side.
    pub const SIZE: usize = 2 * ROOMS + 1;

    /// Colors of walls.
    pub const COLORS: usize = 12;

    /// Creates the maze of a seed: a random spanning tree of rooms, grown depth first, without half
    /// of the remaining walls between rooms.
    pub fn new(seed: u64) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let blocks = (0..Self::SIZE * Self::SIZE).map(|_| rng.random_range(1..=Self::COLORS as u8));
        let mut maze = Self { blocks: blocks.collect() };
        let mut path = vec![(1, 1)];
        maze.open((1, 1));
        while let Some(&(x, y)) = path.last() {
            let next: Vec<_> =
                neighbors(x, y).into_iter().filter(|&(x, y)| maze.is_wall(x, y)).collect();
            if next.is_empty() {
                path.pop();
                continue;
            }
            let to = next[rng.random_range(0..next.len())];
            maze.open(((x + to.0) / 2, (y + to.1) / 2));
            maze.open(to);
            path.push(to);
        }
        for y in 1..Self::SIZE - 1 {
            for x in 1..Self::SIZE - 1 {
                if (x + y) % 2 == 1 && rng.random::<bool>() {
                    maze.open((x, y));
                }
            }
        }
        maze
    }

    fn open(&mut self, (x, y): (usize, usize)) {
        self.blocks[y * Self::SIZE + x] = 0;
    }

    /// Returns whether the block in column `x` and row `y` is a wall; outside the maze all are.
    pub fn is_wall(&self, x: usize, y: usize) -> bool {
        self.color(x, y).is_some()
    }

    /// Returns the color of a wall, below [`COLORS`](Self::COLORS); 0 for blocks outside.
    pub(crate) fn color(&self, x: usize, y: usize) -> Option<usize> {
        match x < Self::SIZE && y < Self::SIZE {
            true => usize::from(self.blocks[y * Self::SIZE + x]).checked_sub(1),
            false => Some(0),
        }
    }

    /// Columns and rows of the rooms.
    pub(crate) fn rooms() -> impl Iterator<Item = (usize, usize)> {
        (0..ROOMS).flat_map(|y| (0..ROOMS).map(move |x| (2 * x + 1, 2 * y + 1)))
    }
}

/// Returns the rooms next to a room.
fn neighbors(x: usize, y: usize) -> Vec<(usize, usize)> {
    let moved = |at: usize| [at.checked_sub(2), (at + 2 < Maze::SIZE).then_some(at + 2)];
    let along = moved(x).into_iter().flatten().map(|x| (x, y));
    along.chain(moved(y).into_iter().flatten().map(|y| (x, y))).collect()
}
