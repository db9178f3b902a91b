//! Lists with keys that other programs wrote, with names that Stoker cannot use.

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt as _;

use crate::{Credentials, Storage, StorageError};

/// Starts a server that answers every request of S3 with this list. Returns its URL.
fn serve_list(contents: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            let body = format!("<ListBucketResult>{contents}</ListBucketResult>");
            let len = body.len();
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n");
            stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        }
    });
    format!("http://{address}")
}

fn bucket(contents: &'static str) -> Storage {
    let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
    let keys: Credentials =
        keys.map(|(name, key)| (name.to_owned(), key.to_owned())).into_iter().collect();
    Storage::open_with("s3://bucket/root", Some(&serve_list(contents)), &keys).unwrap()
}

#[track_caller]
fn check<T: std::fmt::Debug>(listed: Result<T, StorageError>, texts: &[&str]) {
    let error = listed.unwrap_err();
    assert!(matches!(error, StorageError::BadUrl { .. }), "{error:?}");
    let error = error.to_string();
    for text in texts {
        assert!(error.contains(text), "{text}: {error}");
    }
}

const OBJECTS: &str = "\
    <Contents><Key>root/p/good</Key><Size>1</Size>\
    <LastModified>2026-01-01T00:00:00Z</LastModified></Contents>\
    <Contents><Key>root/p//notes</Key><Size>1</Size>\
    <LastModified>2026-01-01T00:00:00Z</LastModified></Contents>";

#[tokio::test]
async fn unusable_keys_are_named_with_a_remedy() {
    let key = "the key \"root/p//notes\" has";
    check(bucket(OBJECTS).list("p").await, &["cannot list \"p\"", key, "rename the object"]);
    let prefixes = "<CommonPrefixes><Prefix>root//</Prefix></CommonPrefixes>";
    let keys = "keys that begin with \"root//\" have";
    check(bucket(prefixes).folders("").await, &["cannot list \"\"", keys, "rename these objects"]);
}

#[tokio::test]
async fn unusable_file_names_are_named_with_a_remedy() {
    for (name, shown) in [("two\nlines".as_bytes(), "two\\nlines"), (b"\xff", "%FF")] {
        let folder = tempfile::tempdir().unwrap();
        let local = Storage::open(folder.path().to_str().unwrap(), None).unwrap();
        local.put("p/good", "x".into()).await.unwrap();
        std::fs::write(folder.path().join("p").join(OsStr::from_bytes(name)), "x").unwrap();
        let key = format!("the key \"p/{shown}\" has");
        check(local.list("p").await, &["cannot list \"p\"", &key, "rename the object"]);
    }
}
