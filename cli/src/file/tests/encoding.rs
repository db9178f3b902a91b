//! Tests of files that are not UTF-8.

use super::*;

#[test]
fn other_encodings_have_a_remedy() {
    let check = |bytes: &[u8], expected: &str| {
        assert_eq!(decode(bytes.to_vec()).unwrap_err(), format!("cannot be read: {expected}"));
    };
    check(b"\xff\xfea\0", "the file is UTF-16; save it as UTF-8");
    check(b"\xfe\xff\0a", "the file is UTF-16; save it as UTF-8");
    check(b"a: b\nc: \xe9\n", "line 2 is not UTF-8; save the file as UTF-8");
    check(b"\xe9", "line 1 is not UTF-8; save the file as UTF-8");
    assert_eq!(decode("a: é".into()).unwrap(), "a: é");
}
