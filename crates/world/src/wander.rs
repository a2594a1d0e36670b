//! A player who explores.

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::{Frame, Input, Maze, Player};

/// Plays as somebody who looks around: walks ahead for a while, turns ever faster and slower again,
/// turns away from walls, and sometimes steps aside or back. An endless stream of inputs, each with
/// the frame that it leads to.
#[derive(Clone, Debug)]
pub struct Wanderer<'a> {
    maze: &'a Maze,
    player: Player,
    rng: Xoshiro256PlusPlus,
    input: Input,
    /// The speed of turning that is aimed at.
    aim: i8,
    /// Frames until another speed is aimed at.
    turning: u32,
    /// Frames until other buttons are pressed.
    walking: u32,
}

/// Frames ahead within which a wall makes the player turn.
const LOOKAHEAD: usize = 6;

impl<'a> Wanderer<'a> {
    /// Somebody at a random place; everything is a function of the seed.
    pub fn new(maze: &'a Maze, seed: u64) -> Self {
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x5eed_0f0c_0a7e_0001);
        let (player, input) = (Player::new(maze, seed), Input::default());
        Self { maze, player, rng, input, aim: 0, turning: 0, walking: 0 }
    }

    /// Walks for `frames` frames without rendering them.
    pub fn walk(&mut self, frames: usize) {
        for _ in 0..frames {
            self.go();
        }
    }

    fn go(&mut self) -> Input {
        let input = self.decide();
        self.player.step(self.maze, input);
        input
    }

    /// The player's position.
    pub fn player(&self) -> &Player {
        &self.player
    }

    /// Returns whether a wall is close ahead.
    fn is_blocked(&self) -> bool {
        let mut ahead = self.player;
        let walk = Input { forward: true, ..Input::default() };
        (0..LOOKAHEAD).any(|_| {
            let before = ahead;
            ahead.step(self.maze, walk);
            let [x, y] = [ahead.x - before.x, ahead.y - before.y];
            // Half the length of a free step, squared.
            x * x + y * y < 0.0036
        })
    }

    /// Decides the player's next input.
    fn decide(&mut self) -> Input {
        let rng = &mut self.rng;
        if self.walking == 0 {
            self.walking = rng.random_range(6..20);
            let (walk, aside) = (rng.random_range(0..20), rng.random_range(0..8));
            let turn = self.input.turn;
            let (forward, back) = (walk < 15, walk == 15);
            self.input = Input { turn, forward, back, left: aside == 0, right: aside == 1 };
        }
        if self.turning == 0 {
            self.turning = rng.random_range(4..14);
            self.aim = match rng.random::<bool>() {
                true => 0,
                false => rng.random_range(-Player::MAX_TURN..=Player::MAX_TURN),
            };
        }
        if self.input.forward && self.aim.abs() < 2 && self.is_blocked() {
            let side = if self.rng.random::<bool>() { 1 } else { -1 };
            self.aim = side * self.rng.random_range(2..=Player::MAX_TURN);
            self.turning = self.rng.random_range(6..12);
        }
        self.walking -= 1;
        self.turning -= 1;
        // The hand that moves the mouse has inertia.
        self.input.turn += (self.aim - self.input.turn).signum();
        self.input
    }
}

impl Iterator for Wanderer<'_> {
    type Item = (Input, Frame);

    fn next(&mut self) -> Option<(Input, Frame)> {
        let input = self.go();
        Some((input, Frame::render(self.maze, &self.player)))
    }
}
