//! Does nothing. With this file, cargo takes the features of the build dependencies into account.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
