//! Transfers of files that are stored, read and copied in parts.

use super::*;

#[test]
fn large_files_are_transferred_and_verified() {
    let (folder, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let context = alone(folder.path());
    let session = context.session();
    let large: Vec<u8> = (0..(64 << 20) + 3).map(|at: u32| (at % 251) as u8).collect();
    let name = session.store_path(Upload::at(1), |folder| {
        std::fs::write(folder.join("large"), &large)?;
        write(folder, &[("small", "text")])
    });
    let name = name.unwrap();
    let stored = folder.path().join("trial/checkpoints").join(&name);
    let (from_storage, from_folder) = (to.path().join("a"), to.path().join("b"));
    session.download(session.checkpoint(&name), &from_storage).unwrap();
    session.download(CheckpointSource::folder(&from_storage), &from_folder).unwrap();
    for folder in [&from_storage, &from_folder] {
        assert!(std::fs::read(folder.join("large")).unwrap() == large);
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["large", "manifest.json", "small"]);
    }
    // A damaged file does not replace an earlier one.
    let change = |folder: &Path, at: usize| {
        let mut damaged = large.clone();
        damaged[at] ^= 1;
        std::fs::write(folder.join("large"), damaged).unwrap();
    };
    change(&stored, 64 << 20);
    change(&from_storage, 5);
    let check = |from: CheckpointSource, folder: &Path, part: &str| {
        let error = session.download(from, folder).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert!(!folder.join("large#partial").exists());
    };
    check(session.checkpoint(&name), &from_folder, "large has BLAKE3");
    check(CheckpointSource::folder(&from_storage), &from_folder, "large has BLAKE3");
    std::fs::write(stored.join("large"), &large[1..]).unwrap();
    check(session.checkpoint(&name), &from_folder, "large has 67108866 bytes, but manifest.json");
    std::fs::remove_file(stored.join("large")).unwrap();
    check(session.checkpoint(&name), &from_folder, "large is missing");
    assert!(std::fs::read(from_folder.join("large")).unwrap() == large);
}
