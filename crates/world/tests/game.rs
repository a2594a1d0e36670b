//! The game: what it shows, where one can go, and that it is the same every time.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;

use kv_world::{Codec, Error, Frame, Input, Maze, Picture, Player, Wanderer, animation};
use safetensors::{Dtype, tensor::TensorView};

fn walk() -> Input {
    Input { forward: true, ..Input::default() }
}

#[test]
fn frames_are_pinned() {
    let mut hasher = crc32fast::Hasher::new();
    for seed in 0..3 {
        let maze = Maze::new(seed);
        for (input, frame) in Wanderer::new(&maze, seed).take(40) {
            hasher.update(&[input.turn as u8]);
            hasher.update(&input.buttons().map(u8::from));
            hasher.update(frame.rgb());
        }
    }
    assert_eq!(hasher.finalize(), 3_392_093_370, "another world: models have to be trained anew");
}

#[test]
fn seeds_differ() {
    let maze = Maze::new(0);
    assert_ne!(maze, Maze::new(1));
    let play = |seed| Wanderer::new(&maze, seed).take(5).collect::<Vec<_>>();
    assert_eq!(play(1), play(1));
    assert_ne!(play(1), play(2));
    let mut late = Wanderer::new(&maze, 1);
    late.walk(3);
    assert_eq!(late.take(2).collect::<Vec<_>>(), play(1)[3..]);
}

#[test]
fn a_whole_turn_is_none() {
    let maze = Maze::new(0);
    for seed in 0..5 {
        let mut player = Player::new(&maze, seed);
        let first = Frame::render(&maze, &player);
        let turn = Input { turn: 3, ..Input::default() };
        let frames: Vec<_> = (0..32)
            .map(|_| {
                player.step(&maze, turn);
                Frame::render(&maze, &player)
            })
            .collect();
        assert_eq!(frames[31], first);
        assert!(frames[..31].iter().all(|frame| *frame != first));
        // Four counts to the left and to the right are none either.
        player.step(&maze, Input { turn: -4, ..Input::default() });
        assert_ne!(Frame::render(&maze, &player), first);
        player.step(&maze, Input { turn: 4, ..Input::default() });
        assert_eq!(Frame::render(&maze, &player), first);
    }
}

/// Nobody is ever closer to a wall than a quarter of a block, whatever the controls, and every room
/// can be reached.
#[test]
fn walls_are_not_walked_through() {
    for seed in 0..6 {
        let maze = Maze::new(seed);
        let mut rooms = std::collections::HashSet::new();
        for seed in 0..4 {
            let mut wanderer = Wanderer::new(&maze, seed);
            for _ in 0..1500 {
                wanderer.next();
                let [x, y] = wanderer.player().position();
                for (x, y) in
                    [-0.249, 0.249].iter().flat_map(|a| [(x + a, y - 0.249), (x + a, y + 0.249)])
                {
                    assert!(!maze.is_wall(x as usize, y as usize), "in a wall at {x}, {y}");
                }
                rooms.insert((x as usize, y as usize));
            }
        }
        let open = (0..49).filter(|i| !maze.is_wall(i % 7, i / 7)).count();
        assert!(rooms.len() * 10 >= open * 9, "{} of {open} blocks seen", rooms.len());
    }
}

/// Walking ahead ends at a wall, which then fills the view, and walking back along the same line
/// starts there.
#[test]
fn a_wall_stops() {
    let maze = Maze::new(0);
    let mut player = Player::new(&maze, 0);
    while !player.heading().is_multiple_of(24) {
        player.step(&maze, Input { turn: 1, ..Input::default() });
    }
    (0..100).for_each(|_| player.step(&maze, walk()));
    let there = player;
    player.step(&maze, walk());
    assert_eq!(player, there);
    let [x, y] = there.position();
    let along = if there.heading().is_multiple_of(48) { x } else { y };
    let to_side = (along - along.round()).abs();
    assert!((to_side - 0.25).abs() < 1e-9, "{to_side} from the wall");
    player.step(&maze, Input { back: true, ..Input::default() });
    let moved = player.position().into_iter().zip(there.position()).map(|(a, b)| (a - b).abs());
    assert!((moved.sum::<f64>() - 0.12).abs() < 1e-9);
}

/// The closer a wall, the more of the picture it takes: the sky at the upper edge of the middle
/// column is as bright as the sky only from afar.
#[test]
fn walls_grow() {
    let maze = Maze::new(0);
    let mut player = Player::new(&maze, 0);
    while !player.heading().is_multiple_of(24) {
        player.step(&maze, Input { turn: 1, ..Input::default() });
    }
    let wall = |player: &Player| {
        let frame = Frame::render(&maze, player);
        // The floor is gray and dark, the sky is blue; both are the same in all views.
        let column = |row: usize| &frame.rgb()[3 * (row * Frame::SIZE + 24)..][..3];
        let sky = (0..24).take_while(|&row| column(row)[2] >= 190 && column(row)[0] < 185).count();
        24 - sky
    };
    let mut seen = vec![];
    for _ in 0..40 {
        player.step(&maze, walk());
        seen.push(wall(&player));
    }
    assert!(seen.is_sorted(), "{seen:?}");
    assert_eq!(seen.last(), Some(&24));
}

#[test]
fn latents_restore_frames() {
    let maze = Maze::new(0);
    let frames: Vec<_> = Wanderer::new(&maze, 1).take(300).map(|(_, frame)| frame).collect();
    let others: Vec<_> = Wanderer::new(&maze, 2).take(50).map(|(_, frame)| frame).collect();
    let error = |codec: &Codec| {
        let squares = others.iter().map(|frame| {
            let restored = codec.decode(&codec.encode(frame));
            let pairs = restored.rgb().iter().zip(frame.rgb());
            pairs.map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>()
        });
        squares.sum::<f64>() / (others.len() * others[0].rgb().len()) as f64
    };
    let errors = [4, 8, 16, 32, 108].map(|n| error(&Codec::fit(&frames, 6, n).unwrap()));
    assert!(errors.is_sorted_by(|a, b| a > b), "{errors:?}");
    // 30 dB, and all axes lose nothing but the rounding to bytes.
    assert!(errors[3] < 65.0, "{errors:?}");
    assert!(errors[4] < 0.1, "{errors:?}");

    let codec = Codec::fit(&frames, 8, 32).unwrap();
    let latents: Vec<f32> = frames.iter().flat_map(|frame| codec.encode(frame)).collect();
    let square = latents.iter().map(|x| x * x).sum::<f32>() / latents.len() as f32;
    assert!((square - 1.0).abs() < 1e-3, "mean square {square}");

    let folder = tempfile::tempdir().unwrap();
    codec.save(folder.path()).unwrap();
    assert_eq!(Codec::load(folder.path()).unwrap(), codec);
    let file = folder.path().join(Codec::FILE);
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 4]).unwrap();
    let error = Codec::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains(Codec::FILE) && !error.contains('\n'), "{error}");
}

/// A complete new file replaces the old one, and no temporary file is left.
#[test]
fn codecs_replace_files_whole() {
    let maze = Maze::new(0);
    let frames: Vec<_> = Wanderer::new(&maze, 1).take(30).map(|(_, frame)| frame).collect();
    let [first, second] = [4, 8].map(|channels| Codec::fit(&frames, 8, channels).unwrap());
    let folder = tempfile::tempdir().unwrap();
    first.save(folder.path()).unwrap();
    let (file, link) = (folder.path().join(Codec::FILE), folder.path().join("link"));
    fs::hard_link(&file, &link).unwrap();
    let bytes = fs::read(&file).unwrap();
    second.save(folder.path()).unwrap();
    assert_eq!(Codec::load(folder.path()).unwrap(), second);
    assert_eq!(fs::read(&link).unwrap(), bytes, "the first file was written over");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "a file is left");
    let error = first.save(&folder.path().join("nowhere")).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains(Codec::FILE));
}

/// Files of tensors that no codec has, of patches of one pixel.
#[test]
fn files_of_no_codec_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let load = |mean: &[usize], axes: &[usize], (shape, scale): (&[usize], &[f32])| {
        let zeros = |shape: &[usize]| vec![0.0; shape.iter().product()];
        let tensors = [
            ("mean", mean, zeros(mean)),
            ("axes", axes, zeros(axes)),
            ("scale", shape, scale.to_vec()),
        ];
        let bytes = tensors.each_ref().map(|(.., numbers)| {
            numbers.iter().flat_map(|x: &f32| x.to_le_bytes()).collect::<Vec<u8>>()
        });
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap())
        });
        let file = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
        fs::write(folder.path().join(Codec::FILE), file).unwrap();
        Codec::load(folder.path())
    };
    let fits: (&[usize], &[f32]) = (&[2], &[0.5, 2.0]);
    assert_eq!(load(&[3], &[2, 3], fits).unwrap().channels(), 2);
    for (mean, axes, scale, wanted) in [
        (&[3][..], &[2, 3][..], (&[2][..], &[0.5, 0.0][..]), "scale has 0, all of it must be"),
        (&[3], &[2, 3], (&[2], &[-1.5, 1.0]), "scale has -1.5, all of it must be above 0"),
        (&[3], &[2, 3], (&[2], &[1.0, f32::INFINITY]), "scale is not finite"),
        (&[3], &[2, 3], (&[2], &[f32::NAN, 1.0]), "scale is not finite"),
        (&[3], &[0, 3], (&[0], &[]), "scale [0] are of no codec"),
        (&[3], &[2, 3], (&[2, 1], &[1.0, 1.0]), "scale [2, 1] are of no codec"),
        (&[3], &[1, 3], (&[], &[1.0]), "scale [] are of no codec"),
        (&[1, 3], &[2, 3], fits, "mean [1, 3], axes"),
        (&[3], &[3, 2], fits, "axes [3, 2] and"),
        (&[6], &[2, 6], fits, "mean [6], axes"),
    ] {
        let error = load(mean, axes, scale).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Malformed { .. }), "{text}");
        assert!(text.contains(wanted) && !text.contains('\n'), "{text} lacks {wanted}");
    }
}

#[test]
fn what_cannot_be_is_named() {
    let frames = [Frame::render(&Maze::new(0), &Player::new(&Maze::new(0), 0))];
    let fails = |frames: &[Frame], patch, channels| {
        Codec::fit(frames, patch, channels).unwrap_err().to_string()
    };
    assert!(fails(&[], 8, 4).contains("frames 0: must be at least 1"));
    assert!(fails(&frames, 7, 4).contains("patch 7: must divide the 48 pixels"));
    assert!(fails(&frames, 4, 49).contains("channels 49: must be between 1 and the 48 numbers"));
    assert!(Picture::grid(&[], 1).unwrap_err().to_string().contains("at least one frame"));
    assert!(animation(&[], 1).unwrap_err().to_string().contains("pictures 0"));
    let [small, large] = [1, 2].map(|zoom| Picture::grid(&[frames.to_vec()], zoom).unwrap());
    let error = animation(core::slice::from_ref(&small), 0).unwrap_err();
    assert!(matches!(error, Error::Argument { field: "per_second", .. }), "{error}");
    let error = animation(&[small, large], 1).unwrap_err().to_string();
    assert!(error.contains("size (96, 96): must be that of the first, (48, 48)"), "{error}");
}

#[test]
fn pictures_are_read_back() {
    let maze = Maze::new(3);
    let frames: Vec<_> = Wanderer::new(&maze, 1).take(6).map(|(_, frame)| frame).collect();
    let rows = [frames[..3].to_vec(), frames[3..].to_vec()];
    let file = Picture::grid(&rows, 2).unwrap().png().unwrap();
    let mut reader = png::Decoder::new(std::io::Cursor::new(&file)).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    assert_eq!((info.width, info.height), (3 * 96 + 4, 2 * 96 + 2));
    let at = |x: usize, y: usize| &pixels[3 * (y * info.width as usize + x)..][..3];
    for (row, column, y, x) in [(0, 0, 0, 0), (0, 2, 95, 3), (1, 1, 31, 40)] {
        let frame = &frames[3 * row + column];
        let (up, left) = (row * 98 + y, column * 98 + x);
        assert_eq!(at(left, up), &frame.rgb()[3 * (y / 2 * 48 + x / 2)..][..3]);
    }
    assert_eq!(at(97, 0), &[255; 3]);

    let pictures: Vec<_> =
        frames.iter().map(|frame| Picture::grid(&[vec![frame.clone()]], 1).unwrap()).collect();
    let file = animation(&pictures, 10).unwrap();
    let mut reader = png::Decoder::new(std::io::Cursor::new(&file)).read_info().unwrap();
    assert_eq!(reader.info().animation_control().unwrap().num_frames, 6);
    for frame in &frames {
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        assert_eq!(pixels, frame.rgb());
    }
}
