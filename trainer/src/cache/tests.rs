//! Tests within one process: verification, eviction and training on a set.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Int, Tensor, TensorData};
use stoker_storage::Storage;

use super::*;
use crate::callback::{Callback, Control, Logs};
use crate::{Fit, Fitted, LoaderPlan, Optimizers, Standalone, StepOutput, mix_seed};

type Sample = (u64, Vec<u8>);

fn alone(folder: Option<&Path>) -> Context {
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
    for root in [&one, &two] {
        open(&DataCache::new(root.path()), "a", 20, &AtomicUsize::new(0)).unwrap();
    }
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
        let place = Place::new(root.path(), "a", "v1", Split::Training).unwrap();
        let Found::Damaged(why) = Set::find(&place).unwrap() else { panic!("byte {at}") };
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
fn least_recently_used_set_is_evicted() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    // Space for three sets of 100 kB, since the limit reserves whole segments.
    let cache = DataCache::new(root.path()).bytes_max(build::SEGMENT_BYTES + 250_000);
    let has = |id: &str| segment(root.path(), id).exists();
    let used = open(&cache, "a", 100, &builds).unwrap();
    for id in ["b", "c"] {
        open(&cache, id, 100, &builds).unwrap();
    }
    // File times may have a coarse resolution, so set them explicitly.
    for (id, seconds) in [("a", 10), ("b", 30), ("c", 20)] {
        let lock = root.path().join(id).join("v1/training.use");
        let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        std::fs::File::options().write(true).open(lock).unwrap().set_modified(time).unwrap();
    }
    open(&cache, "d", 100, &builds).unwrap();
    assert_eq!(["a", "b", "c", "d"].map(has), [true, true, false, true]);
    check_all(&used, 100);
    drop(used);
    open(&cache, "e", 100, &builds).unwrap();
    assert_eq!(["a", "b", "d", "e"].map(has), [false, true, true, true]);
    assert_eq!(builds.load(Ordering::Relaxed), 5);
}

#[test]
fn files_of_killed_processes_are_deleted() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let version = root.path().join("a/v1");
    let [gone, half, building] = [".gone-1-.training.half", ".training.half", ".validation.half"]
        .map(|name| version.join(name));
    for folder in [&gone, &half, &building] {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("00000.seg"), "half").unwrap();
    }
    let place = Place::new(root.path(), "a", "v1", Split::Validation).unwrap();
    let _builder = place.lock_to_build(|| Ok(())).unwrap();
    open(&DataCache::new(root.path()), "b", 10, &builds).unwrap();
    assert_eq!([gone.exists(), half.exists(), building.exists()], [false, false, true]);
    assert!(!version.join("gone-1-.training.build").exists(), "lock file for a removed folder");
}

#[test]
fn endless_set_is_refused_early() {
    let root = tempfile::tempdir().unwrap();
    let cache = DataCache::new(root.path()).bytes_max(70_000_000);
    let large = || Ok(std::iter::repeat_with(|| Ok(vec![1_u8; 1 << 20])));
    let error = cache.open::<Vec<u8>, _>("a", "v1", Split::Training, large).unwrap_err();
    assert!(error.to_string().contains("raise STOKER_DATA_CACHE_BYTES"), "{error}");
    assert!(!root.path().join("a/v1/.training.half/00000.seg").exists());
}

#[test]
fn size_limit_applies_to_the_actual_size() {
    let root = tempfile::tempdir().unwrap();
    let cache = DataCache::new(root.path()).bytes_max(90_000_000);
    let items =
        |mega: usize| move || Ok(std::iter::repeat_with(|| Ok(vec![1_u8; 1 << 20])).take(mega));
    cache.open::<Vec<u8>, _>("a", "v1", Split::Training, items(80)).unwrap();
    let error = cache.open::<Vec<u8>, _>("b", "v1", Split::Training, items(90)).unwrap_err();
    assert!(error.to_string().contains("exceeds the cache limit (90000000 bytes)"), "{error}");
}

#[test]
fn sets_being_built_count_toward_the_limit() {
    let (root, builds) = (tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    let cache = DataCache::new(root.path()).bytes_max(build::SEGMENT_BYTES + 250_000);
    let first = open(&cache, "a", 100, &builds).unwrap();
    drop(first);
    let place = Place::new(root.path(), "b", "v1", Split::Validation).unwrap();
    let _builder = place.lock_to_build(|| Ok(())).unwrap();
    place.clear().unwrap();
    std::fs::write(place.half().join("00000.seg"), vec![0; 200_000]).unwrap();
    open(&cache, "c", 100, &builds).unwrap();
    assert!(!segment(root.path(), "a").exists(), "the cache exceeds its limit");
    assert!(place.half().join("00000.seg").exists());
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
    let place = Place::new(root.path(), "a", "v1", Split::Training).unwrap();
    assert_eq!(std::fs::read_dir(place.half()).unwrap().count(), 0);
    let _builder = place.lock_to_build(|| Ok(())).unwrap();
    check(cache.open::<u32, _>("a", "v1", Split::Training, || Ok([Ok(1)])).unwrap_err());
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
    assert!(error.contains("data set a v1 (training) has no sample 1, only 1"), "{error}");
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
    struct Labelled {
        #[serde(skip_serializing_if = "Option::is_none")]
        label: Option<u32>,
        pixels: Vec<u8>,
    }
    let root = tempfile::tempdir().unwrap();
    let of = |label| Ok(Labelled { label, pixels: vec![9, 9] });
    let build = || Ok([of(Some(1)), of(None), Err("later samples are built".into())]);
    let opened = DataCache::new(root.path()).open("a", "v1", Split::Training, build);
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("cannot read back") && error.contains("remove serde"), "{error}");
}

/// The other segments are in flight when the first is found damaged.
#[test]
fn failed_download_leaves_the_staging_folder_empty() {
    let context = alone(None);
    let rt = context.io().runtime().clone();
    let [bucket, here] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let storage = Storage::open(bucket.path().to_str().unwrap(), None).unwrap();
    let shared = Shared::new(rt, storage, "ml/datasets");
    let place = Place::new(here.path(), "a", "v1", Split::Training).unwrap();
    place.clear().unwrap();
    // Sizes chosen so that the damaged segment is done while the others are being hashed.
    let segments = [12_usize, 20, 20, 20].iter().enumerate().map(|(number, mega)| {
        let mut writer = segment::Writer::new(&place.half(), number).unwrap();
        writer.record(&vec![number as u8; mega << 20]).unwrap();
        writer.finish().unwrap()
    });
    let manifest = manifest::Manifest::new(&place, segments.collect());
    manifest.write(&place.half()).unwrap();
    place.publish().unwrap();
    shared.upload(&place, false).unwrap();
    let stored = bucket.path().join("ml/datasets/a/v1/training");
    let first = stored.join(format!("{}.seg", manifest.segments[0].sha256));
    std::fs::write(first, vec![0; 12 << 20]).unwrap();
    place.clear().unwrap();
    let room = room::Room::new(here.path(), None, &place).unwrap();
    let error = shared.download(&place, &room).unwrap_err().to_string();
    assert!(error.contains("in the bucket"), "{error}");
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(std::fs::read_dir(place.half()).unwrap().count(), 0);
}

#[test]
fn other_machines_download_instead_of_building() {
    let context = alone(None);
    let rt = context.io().runtime().clone();
    let [bucket, one, two, three, four] = [(); 5].map(|()| tempfile::tempdir().unwrap());
    let storage = Storage::open(bucket.path().to_str().unwrap(), None).unwrap();
    let shared = || Some(Shared::new(rt.clone(), storage.clone(), "ml/datasets"));
    let (builds, of) = (AtomicUsize::new(0), |root: &Path| DataCache::new(root).shared(shared()));
    check_all(&open(&of(one.path()), "a", 50, &builds).unwrap(), 50);
    assert!(bucket.path().join("ml/datasets/a/v1/training/manifest.json").exists());
    check_all(&open(&of(two.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 1);
    let read = |root: &Path| std::fs::read(segment(root, "a")).unwrap();
    assert!(read(one.path()) == read(two.path()));
    // A damaged copy in the bucket is not used.
    let stored = bucket.path().join("ml/datasets/a/v1/training");
    for entry in std::fs::read_dir(stored).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "seg") {
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[77] ^= 1;
            std::fs::write(&file, bytes).unwrap();
        }
    }
    check_all(&open(&of(three.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 2);
    // The machine that found the damage replaced the copy.
    check_all(&open(&of(four.path()), "a", 50, &builds).unwrap(), 50);
    assert_eq!(builds.load(Ordering::Relaxed), 2);
}

/// Checks order and values from several batches of two epochs, with and without workers.
#[test]
fn set_data_can_start_at_any_batch() {
    let root = tempfile::tempdir().unwrap();
    let set = open(&DataCache::new(root.path()), "a", 50, &AtomicUsize::new(0)).unwrap();
    let data = |workers| {
        let batcher = |samples: Vec<Sample>, device: &Device| {
            let labels: Vec<i64> = samples.iter().map(|(index, _)| *index as i64).collect();
            let num = labels.len();
            Tensor::<1, Int>::from_data(TensorData::new(labels, [num]), device)
        };
        set.data(batcher).workers(workers)
    };
    let plan = || LoaderPlan {
        global_batch: 8,
        rank: 0,
        world_size: 1,
        seed: 1,
        shuffle: true,
        device: Device::flex(),
        dtype: burn::tensor::DType::F32,
    };
    let read = |workers: usize, first: u64| -> Vec<Vec<i64>> {
        let batches = data(workers).loader(plan(), first..14);
        let of = |batch: Tensor<1, Int>| batch.into_data().convert::<i64>().try_to_vec().unwrap();
        batches.map(|batch| of(batch.unwrap().unwrap())).collect()
    };
    let all = read(0, 0);
    let mut epoch = all[..7].concat();
    epoch.sort_unstable();
    assert_eq!(epoch, (0..50).collect::<Vec<_>>());
    for (workers, first) in [(0, 3), (2, 0), (2, 9)] {
        assert_eq!(read(workers, first), all[first as usize..]);
    }
}

/// Requests a stop, as a signal would.
struct StopAt(u64, crate::stop::StopSignal);

impl Callback for StopAt {
    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == self.0 {
            self.1.set();
        }
        Ok(())
    }
}

#[test]
fn training_on_a_set_resumes_bit_identical() {
    let _guard = crate::train::tests::lock_random_stream();
    let root = tempfile::tempdir().unwrap();
    let set = open(&DataCache::new(root.path()), "a", 50, &AtomicUsize::new(0)).unwrap();
    let train = |folder: Option<&Path>, stop_at: u64| -> Result<Fitted<Linear>> {
        let context = alone(folder);
        let data = set.data(|samples: Vec<Sample>, device: &Device| {
            let pixels: Vec<f32> = samples
                .iter()
                .flat_map(|(_, bytes)| &bytes[..8])
                .map(|byte| f32::from(*byte) / 255.0)
                .collect();
            Tensor::<2>::from_data(TensorData::new(pixels, [samples.len(), 8]), device)
        });
        let model = LinearConfig::new(8, 8).init(context.device());
        let stop = StopAt(stop_at, context.stop.clone()).boxed();
        let fit = Fit::new(data.skip_shuffle_at_epoch_end().workers(2));
        let fit = fit.batch_size(8).epochs(3).callbacks(vec![stop]);
        let step =
            |model: &Linear, x: Tensor<2>| StepOutput::regression(model.forward(x.clone()), x);
        context.fit(model, Optimizers::one(SgdConfig::new().build(), 0.1), step, fit)
    };
    let weights = |fitted: Fitted<Linear>| -> Vec<u32> {
        let values: Vec<f32> = fitted.model.weight.val().into_data().try_to_vec().unwrap();
        values.iter().map(|value| value.to_bits()).collect()
    };
    let straight = weights(train(None, u64::MAX).unwrap());
    for stop_at in [3, 10] {
        let folder = tempfile::tempdir().unwrap();
        train(Some(folder.path()), stop_at).unwrap_err();
        assert!(weights(train(Some(folder.path()), u64::MAX).unwrap()) == straight, "{stop_at}");
    }
}
