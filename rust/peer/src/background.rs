//! What a transfer may take from the threads that compute: what they leave.

/// Lets the threads of ordinary priority go first, from here to this thread's end: a transfer may wait, rows that run may not.
///
/// Only where priorities are those of threads; a thread that may not change its own goes on as it is.
pub(crate) fn step_back() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, NICE);
}

/// As `nice` means it, the lowest: a few hundredths of a core beside threads that never wait, all of it beside others.
#[cfg(target_os = "linux")]
const NICE: i32 = 19;

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_the_thread_that_steps_back_does() {
        let own = || rustix::process::getpriority_process(None).unwrap();
        let before = own();
        let inside = std::thread::spawn(move || {
            step_back();
            own()
        });
        assert_eq!(inside.join().unwrap(), before.max(NICE));
        assert_eq!(own(), before);
    }
}
