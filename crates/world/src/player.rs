//! Who walks in a maze.

use core::f64::consts::TAU;

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::Maze;

/// The player's input in one frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// Counts that the mouse moves to the right, at most [`Player::MAX_TURN`] either way.
    pub turn: i8,
    /// Walk ahead.
    pub forward: bool,
    /// Walk back.
    pub back: bool,
    /// Step to the left.
    pub left: bool,
    /// Step to the right.
    pub right: bool,
}

impl Input {
    /// Buttons of an input.
    pub const BUTTONS: usize = 4;

    /// The buttons: forward, back, left, right.
    pub fn buttons(&self) -> [bool; Self::BUTTONS] {
        [self.forward, self.back, self.left, self.right]
    }

    /// The movement of the mouse along both axes. Nobody looks up or down here, so the second is 0.
    pub fn mouse(&self) -> [f32; 2] {
        [f32::from(self.turn), 0.0]
    }
}

/// Somebody in a maze.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Player {
    /// From the left side of the maze, in blocks.
    pub(crate) x: f64,
    /// From its upper side, in blocks.
    pub(crate) y: f64,
    /// In [`HEADINGS`](Self::HEADINGS) of a turn, clockwise; 0 looks to the right.
    pub(crate) heading: u16,
}

/// Blocks walked in a frame.
const SPEED: f64 = 0.12;
/// Half the width of a player, in blocks.
const RADIUS: f64 = 0.25;
/// Smaller overlaps count as none.
const EPSILON: f64 = 1e-6;

impl Player {
    /// Directions there are; one count of the mouse turns from one to the next.
    pub const HEADINGS: u16 = 96;
    /// Most counts of the mouse in a frame.
    pub const MAX_TURN: i8 = 4;

    /// In the middle of a random room, with a random heading.
    pub fn new(maze: &Maze, seed: u64) -> Self {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let rooms: Vec<_> = Maze::rooms().filter(|&(x, y)| !maze.is_wall(x, y)).collect();
        let (x, y) = rooms[rng.random_range(0..rooms.len())];
        let heading = rng.random_range(0..Self::HEADINGS);
        Self { x: x as f64 + 0.5, y: y as f64 + 0.5, heading }
    }

    /// Column and row of the maze, in blocks.
    pub fn position(&self) -> [f64; 2] {
        [self.x, self.y]
    }

    /// The heading, less than [`HEADINGS`](Self::HEADINGS).
    pub fn heading(&self) -> u16 {
        self.heading
    }

    /// Returns the unit vector of a heading, rounded so the math libraries of all systems agree.
    pub(crate) fn direction(heading: u16) -> [f64; 2] {
        const UNIT: f64 = (1u64 << 32) as f64;
        let angle = TAU * f64::from(heading) / f64::from(Self::HEADINGS);
        [angle.cos(), angle.sin()].map(|x| (x * UNIT).round() / UNIT)
    }

    /// Turns, then walks; along walls, not through them.
    pub fn step(&mut self, maze: &Maze, input: Input) {
        let turn = i32::from(input.turn.clamp(-Self::MAX_TURN, Self::MAX_TURN));
        let heading = i32::from(self.heading) + turn;
        self.heading = heading.rem_euclid(i32::from(Self::HEADINGS)) as u16;
        let [ahead_x, ahead_y] = Self::direction(self.heading);
        let pressed = |yes: bool, no: bool| f64::from(i8::from(yes) - i8::from(no));
        let (ahead, aside) = (pressed(input.forward, input.back), pressed(input.right, input.left));
        self.x =
            walked(self.x, SPEED * (ahead * ahead_x - aside * ahead_y), |x| hits(maze, x, self.y));
        self.y =
            walked(self.y, SPEED * (ahead * ahead_y + aside * ahead_x), |y| hits(maze, self.x, y));
    }
}

/// Returns the end of a step along one axis, which is before the wall it hits.
fn walked(from: f64, by: f64, hits: impl Fn(f64) -> bool) -> f64 {
    match hits(from + by) {
        false => from + by,
        // A step is shorter than a block, so the wall begins at the side of the block that the
        // front enters.
        true if by > 0.0 => (from + by + RADIUS).floor() - RADIUS,
        true => (from + by - RADIUS).ceil() + RADIUS,
    }
}

/// Returns whether a player at this position overlaps a wall.
fn hits(maze: &Maze, x: f64, y: f64) -> bool {
    let sides = |at: f64| [at - RADIUS + EPSILON, at + RADIUS - EPSILON].map(|at| at as usize);
    sides(x).into_iter().any(|x| sides(y).into_iter().any(|y| maze.is_wall(x, y)))
}
