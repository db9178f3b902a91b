//! Tests of large files, and of checkpoints of older versions.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use proptest::prelude::*;
use stoker_api::contract::HashAlgorithm;
use stoker_storage::hash::{LARGE_BYTES, file_hash, sha256_hex};

use super::*;
use crate::record;

const LEN: usize = 2 * LARGE_BYTES as usize + 5;

/// Contents of a file that is hashed in two complete pieces and a short one.
fn large() -> Bytes {
    (0..LEN).map(|idx| (idx % 251) as u8).collect()
}

fn save_large(fixture: &Fixture) -> CheckpointRef {
    let mut checkpoints = fixture.checkpoints();
    let mut file = FileParts::default();
    // The parts of the file end within pieces.
    let bytes = large();
    file.push(bytes.slice(..100));
    file.push(bytes.slice(100..LARGE_BYTES as usize + 7));
    file.push(bytes.slice(LARGE_BYTES as usize + 7..));
    let produce = move || Ok(NewContents::from([("model".to_owned(), file)]));
    checkpoints.begin(save(100), Box::new(produce)).unwrap();
    let saved = checkpoints.finish().unwrap().unwrap();
    CheckpointRef { name: saved.name, manifest_sha256: saved.manifest_sha256, trial_path: None }
}

/// Restores a checkpoint, or returns why it was refused.
fn restore(fixture: &Fixture, wanted: &CheckpointRef) -> Result<CheckpointContents, String> {
    let restored = fixture.checkpoints().restore(std::slice::from_ref(wanted)).unwrap();
    match restored.checkpoint {
        Some((_, _, contents)) => Ok(contents),
        None => Err(restored.refused[&wanted.name].clone()),
    }
}

#[test]
fn large_files_are_hashed_with_blake3() {
    let fixture = Fixture::new();
    let wanted = save_large(&fixture);
    let folder = fixture.path(&wanted.name);
    let (manifest, contents) = load_folder(&folder).unwrap();
    let hash = file_hash(&[large()], HashAlgorithm::Blake3);
    let expected = FileEntry { bytes: LEN as u64, hash };
    assert_eq!((manifest.format, &manifest.files["model"]), (3, &expected));
    assert!(contents["model"] == large(), "the loaded file differs");
    assert!(restore(&fixture, &wanted).unwrap()["model"] == large(), "the restored file differs");
    // Another store reads a file as a whole.
    let other = Storage::open("memory://", None).unwrap();
    let copied = fixture.rt.block_on(async {
        for path in fixture.storage.list("").await.unwrap() {
            other.put(&path, fixture.storage.get(&path).await.unwrap()).await.unwrap();
        }
        Checkpointer::new(fixture.rt.handle().clone(), other, &fixture.config)
    });
    let restored = copied.restore(std::slice::from_ref(&wanted)).unwrap().checkpoint.unwrap().2;
    assert!(restored["model"] == large(), "the file of another store differs");
}

#[test]
fn any_flipped_bit_of_a_large_file_is_detected() {
    let fixture = Fixture::new();
    let wanted = save_large(&fixture);
    let model = fixture.path(&wanted.name).join("model");
    let file = OpenOptions::new().read(true).write(true).open(&model).unwrap();
    let flip = |bit: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, bit / 8).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], bit / 8).unwrap();
    };
    let check = |bit: u64| {
        flip(bit);
        let refused = restore(&fixture, &wanted).map(|_| ()).unwrap_err();
        assert!(refused.starts_with("model has BLAKE3 "), "bit {bit}: {refused}");
        let refused = load_folder(&fixture.path(&wanted.name)).map(|_| ()).unwrap_err();
        assert!(refused.to_string().contains("model has BLAKE3 "), "bit {bit}: {refused}");
        flip(bit);
    };
    let num_bits = 8 * LEN as u64;
    let piece_bits = 8 * LARGE_BYTES;
    for bit in [0, piece_bits - 1, piece_bits, 2 * piece_bits, num_bits - 1] {
        check(bit);
    }
    let config =
        ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(bit in 0..num_bits)| { check(bit) });
    assert!(restore(&fixture, &wanted).is_ok());
}

#[test]
fn truncated_and_longer_files_are_detected() {
    let fixture = Fixture::new();
    let wanted = save_large(&fixture);
    let model = fixture.path(&wanted.name).join("model");
    let file = OpenOptions::new().write(true).open(&model).unwrap();
    for len in [LEN as u64 + 1, LEN as u64 - 1, 2 * LARGE_BYTES, LARGE_BYTES, 1, 0] {
        file.set_len(len).unwrap();
        let refused = restore(&fixture, &wanted).map(|_| ()).unwrap_err();
        assert_eq!(refused, format!("model has {len} bytes, but manifest.json lists {LEN}"));
    }
}

/// Replaces the manifest by an edited one, and returns its reference.
fn edit(
    fixture: &Fixture,
    wanted: &CheckpointRef,
    change: impl FnOnce(&mut Manifest),
) -> CheckpointRef {
    let path = fixture.path(&wanted.name).join(MANIFEST);
    let mut manifest: Manifest = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    let text = serde_json::to_vec(&manifest).unwrap();
    std::fs::write(&path, &text).unwrap();
    CheckpointRef { manifest_sha256: sha256_hex(&text), ..wanted.clone() }
}

#[test]
fn large_files_of_older_formats_stay_readable() {
    let fixture = Fixture::new();
    let wanted = save_large(&fixture);
    let formats = [HashAlgorithm::Sha256, HashAlgorithm::Sha256Chunks(16 << 20)];
    for (format, algorithm) in (1..).zip(formats) {
        let hash = file_hash(&[large()], algorithm);
        let wanted = edit(&fixture, &wanted, |manifest| {
            manifest.format = format;
            manifest.files.insert("model".to_owned(), FileEntry { bytes: LEN as u64, hash });
        });
        let text = std::fs::read_to_string(fixture.path(&wanted.name).join(MANIFEST)).unwrap();
        assert_eq!(text.contains("chunkBytes"), format == 2, "{text}");
        let restored = restore(&fixture, &wanted).unwrap();
        assert!(restored["model"] == large(), "the file of format {format} differs");
        assert!(load_folder(&fixture.path(&wanted.name)).is_ok(), "format {format}");
    }
}

#[test]
fn manifests_of_newer_formats_are_refused() {
    let fixture = Fixture::new();
    let wanted = edit(&fixture, &fixture.save(100), |manifest| manifest.format = 4);
    let refused = restore(&fixture, &wanted).unwrap_err();
    let expected = "cannot read manifest.json: it has format 4, but this version reads formats 1 \
                    to 3; use the version that wrote it";
    assert_eq!(refused, expected);
}

#[test]
fn small_checkpoints_keep_format_1() {
    let fixture = Fixture::new();
    fixture.save(100);
    let (manifest, _) = load_folder(&fixture.path("000000000100-2")).unwrap();
    assert_eq!(manifest.format, 1);
    let hash = HashAlgorithm::Sha256.hash(sha256_hex(b"weights"));
    assert_eq!(manifest.files["model"].hash, hash);
    let text = std::fs::read_to_string(fixture.path("000000000100-2").join(MANIFEST)).unwrap();
    assert!(!text.contains("blake3"), "{text}");
}

/// Model of `tests/data/checkpoint-format-1`, which a version without chunks saved by
/// `example-first-trial --hparam hidden=3 --batches 4`.
#[derive(Debug, Module)]
struct Network {
    hidden: Linear,
    output: Linear,
}

#[test]
fn recorded_checkpoint_of_format_1_is_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/checkpoint-format-1");
    let (manifest, contents) = load_folder(std::path::Path::new(folder)).unwrap();
    assert_eq!((manifest.format, manifest.batches, contents.len()), (1, 4, 3));
    let device = Device::flex();
    let model = {
        let _stream = crate::train::tests::lock_random_stream();
        let hidden = LinearConfig::new(2, 3).init(&device);
        record::initialize(Network { hidden, output: LinearConfig::new(3, 2).init(&device) })
    };
    // The same state still gives the same bytes.
    let model = record::load_model(model, &contents).unwrap();
    let saved = record::snapshot(&model).into_bytes().unwrap();
    assert_eq!(saved, contents[record::MODEL]);
    let optimizers = &contents["optimizers.bpk"];
    let saved = record::to_canonical(record::to_burn_bytes(optimizers)).unwrap().into_bytes();
    assert_eq!(saved, optimizers);
}
