//! Tests within one process: building, verification and refusals.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use stoker_api::contract::ExitCode;

use super::*;
use crate::{Error, Standalone, mix_seed};

mod bucket;
mod limits;
mod training;
mod transfers;

type Sample = (u64, Vec<u8>);

fn standalone(folder: Option<&Path>) -> Context {
    let folder = folder.map(Path::to_path_buf);
    Standalone { folder, quiet: true, ..Standalone::default() }.context().unwrap()
}

/// Payload size of each sample.
const SAMPLE_BYTES: usize = 1_000;

fn sample(index: u64) -> Sample {
    let byte = |at: usize| mix_seed(&[index, at as u64]) as u8;
    (index, (0..SAMPLE_BYTES).map(byte).collect())
}

/// Opens a set with this many samples and counts the builds.
fn open(cache: &DataCache, id: &str, samples: u64, builds: &AtomicUsize) -> Result<Cached<Sample>> {
    cache.open(id, "v1", Split::Training, || {
        builds.fetch_add(1, Ordering::Relaxed);
        Ok((0..samples).map(|index| Ok(sample(index))))
    })
}

fn check_all(set: &Cached<Sample>, samples: u64) {
    assert_eq!(set.len() as u64, samples);
    (0..samples).for_each(|index| assert_eq!(set.get(index as usize).unwrap(), sample(index)));
}

/// Path of the set's single segment.
fn segment(root: &Path, id: &str) -> PathBuf {
    root.join(id).join("v1/training/00000.seg")
}

#[test]
fn second_open_builds_nothing() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let cache = DataCache::new(root.path());
    for _ in 0..3 {
        check_all(&open(&cache, "a", 50, &builds).unwrap(), 50);
    }
    assert_eq!(builds.load(Ordering::Relaxed), 1);
    let other = cache.open("a", "v2", Split::Training, || Ok([Ok(7_u32)]));
    assert_eq!(other.unwrap().get(0).unwrap(), 7);
    let validation = cache.open("a", "v1", Split::Validation, || Ok([Ok(8_u32), Ok(9)]));
    assert_eq!(validation.unwrap().get(1).unwrap(), 9);
    check_all(&open(&cache, "a", 50, &builds).unwrap(), 50);
}

#[test]
fn equal_samples_give_equal_files() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sha256 = |set: Cached<Sample>| set.inner.set.sha256();
    let hashes = [&one, &two].map(|root| {
        let cache = DataCache::new(root.path());
        let set = open(&cache, "a", 20, &AtomicUsize::new(0)).unwrap();
        let reversed = cache
            .open("b", "v1", Split::Training, || Ok((0..20).rev().map(|index| Ok(sample(index)))));
        (sha256(set), sha256(reversed.unwrap()))
    });
    assert_eq!(hashes[0], hashes[1]);
    assert_ne!(hashes[0].0, hashes[0].1, "another order has another hash");
    let read = |root: &Path| std::fs::read(segment(root, "a")).unwrap();
    assert!(read(one.path()) == read(two.path()));
}

#[test]
fn damaged_set_is_rebuilt_on_open() {
    let root = tempfile::tempdir().unwrap();
    let cache = DataCache::new(root.path());
    let length = {
        open(&cache, "a", 20, &AtomicUsize::new(0)).unwrap();
        std::fs::metadata(segment(root.path(), "a")).unwrap().len() as usize
    };
    // One byte in each part: head, records, tables, foot.
    for at in [3, 5_000, length - 300, length - 100, length - 12, length - 1] {
        let builds = AtomicUsize::new(0);
        damage(root.path(), at);
        let dir = DatasetDir::new(root.path(), "a", "v1", Split::Training).unwrap();
        let CacheState::Corrupt(why) = Dataset::open(&dir, &cache.stop).unwrap() else {
            panic!("byte {at}")
        };
        assert!(why.starts_with("00000.seg has SHA-256 "), "{why}");
        check_all(&open(&cache, "a", 20, &builds).unwrap(), 20);
        assert_eq!(builds.load(Ordering::Relaxed), 1, "byte {at}");
    }
    // A file that is too short, or missing.
    let file = std::fs::OpenOptions::new().write(true).open(segment(root.path(), "a")).unwrap();
    file.set_len(100).unwrap();
    let builds = AtomicUsize::new(0);
    check_all(&open(&cache, "a", 20, &builds).unwrap(), 20);
    std::fs::remove_file(root.path().join("a/v1/training/manifest.json")).unwrap();
    check_all(&open(&cache, "a", 20, &builds).unwrap(), 20);
    assert_eq!(builds.load(Ordering::Relaxed), 2);
}

#[test]
fn set_of_another_format_is_not_deleted() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let cache = DataCache::new(root.path());
    open(&cache, "a", 20, &builds).unwrap();
    let manifest = root.path().join("a/v1/training/manifest.json");
    std::fs::write(&manifest, "{\"format\": 2}").unwrap();
    let error = open(&cache, "a", 20, &builds).unwrap_err().to_string();
    assert!(error.contains("has the format of another version of Stoker; set STOKER"), "{error}");
    assert!(manifest.exists() && segment(root.path(), "a").exists());
    assert_eq!(builds.load(Ordering::Relaxed), 1);
}

#[test]
fn each_format_has_its_directory() {
    let names = [1, 2, 10].map(|format| dataset_dir::set_name(Split::Training, format));
    assert_eq!(names, ["training", "training.v2", "training.v10"]);
    assert!(names.iter().all(|name| dataset_dir::is_set_name(name)));
    for name in ["training.v", "training.v1", "training.v02", "training.use", ".training", ""] {
        assert!(!dataset_dir::is_set_name(name), "{name}");
    }
}

/// Flips a bit in a new file, since a disk error does not change existing mappings.
fn damage(root: &Path, at: usize) {
    let path = segment(root, "a");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
}

#[test]
fn later_damage_is_detected_on_read() {
    use std::os::unix::fs::FileExt as _;

    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let cache = DataCache::new(root.path());
    let set = open(&cache, "a", 20, &builds).unwrap();
    let path = segment(root.path(), "a");
    let changed = std::fs::metadata(&path).unwrap().modified().unwrap();
    let file = std::fs::OpenOptions::new().write(true).read(true).open(&path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5_000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 5_000).unwrap();
    file.set_modified(changed).unwrap();
    // Like bit rot, the change leaves the modification time: `open` succeeds, one read fails.
    let again = open(&cache, "a", 20, &builds).unwrap();
    let wrong: Vec<_> = (0..20).filter_map(|index| again.get(index).err()).collect();
    assert_eq!(wrong.len(), 1);
    let text = wrong[0].to_string();
    assert!(text.contains("data set a v1 (training): record 4 of 00000.seg, bytes "), "{text}");
    drop((set, again));
    check_all(&open(&cache, "a", 20, &builds).unwrap(), 20);
    assert_eq!(builds.load(Ordering::Relaxed), 2);
}

#[test]
fn preemption_stops_building_and_waiting() {
    let (root, stop) = (tempfile::tempdir().unwrap(), crate::stop::StopSignal::default());
    let cache = DataCache { stop: stop.clone(), ..DataCache::new(root.path()) };
    let check = |error: Error| {
        assert!(error.to_string().contains("preempted before data set a v1"), "{error}");
        assert_eq!(crate::error::exit_code(&*error), ExitCode::Preempted);
    };
    let long = || {
        Ok((0_u32..100_000).map(|index| {
            if index == 1000 {
                stop.set();
            }
            Ok(index)
        }))
    };
    check(cache.open::<u32, _>("a", "v1", Split::Training, long).unwrap_err());
    let dir = DatasetDir::new(root.path(), "a", "v1", Split::Training).unwrap();
    assert_eq!(std::fs::read_dir(dir.staging_dir()).unwrap().count(), 0);
    let _builder = dir.lock_for_building(|| Ok(())).unwrap();
    check(cache.open::<u32, _>("a", "v1", Split::Training, || Ok([Ok(1)])).unwrap_err());
}

#[test]
fn interrupted_verification_keeps_the_set() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let cache = DataCache::new(root.path());
    open(&cache, "a", 20, &builds).unwrap();
    std::fs::remove_file(root.path().join("a/v1/training/checked.json")).unwrap();
    let stopped = DataCache { stop: StopSignal::default(), ..cache.clone() };
    stopped.stop.set();
    let error = open(&stopped, "a", 20, &builds).unwrap_err();
    assert_eq!(crate::error::exit_code(&*error), ExitCode::Preempted, "{error}");
    check_all(&open(&cache, "a", 20, &builds).unwrap(), 20);
    // A verified set opens at once.
    check_all(&open(&stopped, "a", 20, &builds).unwrap(), 20);
    assert_eq!(builds.load(Ordering::Relaxed), 1);
}

#[test]
fn invalid_sets_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let cache = DataCache::new(root.path());
    let check = |error: Result<Cached<u32>>, expected: &str| {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let one = || Ok([Ok(1_u32)]);
    check(cache.open("../a", "v1", Split::Training, one), "the id of a data set is \"../a\"");
    check(cache.open("a", "", Split::Training, one), "the version of a data set is \"\"");
    let none = || Ok(std::iter::empty());
    check(cache.open("a", "v1", Split::Training, none), "(training) was built without a sample");
    let torn = || Ok([Ok(1_u32), Err("sample 1 is torn".into())]);
    check(cache.open("a", "v1", Split::Training, torn), "sample 1 is torn");
    // The failed builds leave no files.
    assert_eq!(cache.open("a", "v1", Split::Training, one).unwrap().len(), 1);
    let other = cache.open("a", "v1", Split::Training, || Ok([Ok("text".to_owned())])).unwrap();
    let error = other.get(0).unwrap_err().to_string();
    assert!(error.contains("the type of sample 0 differs from the program's"), "{error}");
    let checked = root.path().join("a/v1/training/checked.json");
    assert!(checked.exists());
    let error = other.get(1).unwrap_err().to_string();
    assert!(error.contains("sample 1 not found: data set a v1 (training) has 1"), "{error}");
    assert!(checked.exists(), "an invalid index must not count as damage");
}

#[test]
fn readable_sample_of_another_type_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let cache = DataCache::new(root.path());
    let first = || Ok([Ok((7_u32, vec![0.5_f32, 1.5]))]);
    cache.open("a", "v1", Split::Training, first).unwrap();
    // The list's length would decode as the second number.
    let other = || Ok([Ok((7_u32, 2_u32))]);
    let error = cache.open("a", "v1", Split::Training, other).unwrap().get(0).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("differs from the program's: 8 of its 10 bytes are unused"), "{error}");
}

#[test]
fn unreadable_samples_are_refused_while_building() {
    #[derive(serde::Deserialize, Serialize)]
    struct Labeled {
        #[serde(skip_serializing_if = "Option::is_none")]
        label: Option<u32>,
        pixels: Vec<u8>,
    }
    let root = tempfile::tempdir().unwrap();
    let of = |label| Ok(Labeled { label, pixels: vec![9, 9] });
    let build = || Ok([of(Some(1)), of(None), Err("later samples are built".into())]);
    let opened = DataCache::new(root.path()).open("a", "v1", Split::Training, build);
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("cannot read back") && error.contains("remove serde"), "{error}");
}
